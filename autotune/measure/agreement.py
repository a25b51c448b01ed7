"""Does a configuration still say what the model says? Greedy outputs compared with the baseline's.

Batching and other kernels change the last bits of the logits, so that now and then a near tie falls the other way and
the texts part. That noise is measured on the baseline itself, as partings per token; a configuration is wrong
when it parts from the baseline far more often than that, or loops or falls silent where the baseline does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from autotune.loadgen.body import auth, request_body
from autotune.loadgen.prompts import Prompt, PromptSet
from autotune.loadgen.spec import PromptSpec, Target
from autotune.records import UsageError
from autotune.utils.http import BadAnswer, NoAnswer, ask, completion_text, count, error_in, usage_of

NOISE_CONFIDENCE = 0.95
LOOP_PERIOD = 64  # characters
LOOP_REPEATS = 4
MOST_CHARS_PER_TOKEN = 256
"""More of an output is not looked at: no answer to so few tokens is so long."""


@dataclasses.dataclass(frozen=True)
class AgreementSettings:
    """`prompts` greedy outputs of `output_tokens` tokens each, from prompts of about `context_tokens` tokens.

    Partings per token up to `floor` are never wrong, nor up to `ratio` times the baseline's own; beyond that, chance
    must explain them with less than `alpha`. `timeout_s` is for one output.
    """

    prompts: int
    output_tokens: int
    context_tokens: int
    floor: float
    ratio: float
    alpha: float
    timeout_s: float

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.output_tokens < 1 or self.context_tokens < 1:
            raise UsageError("agreement: prompts, output_tokens and context_tokens must be at least 1")
        if not 0 < self.floor < 1 or self.ratio < 1 or not 0 < self.alpha < 0.5:
            raise UsageError("agreement: needs 0 < floor < 1, ratio >= 1 and 0 < alpha < 0.5")


@dataclasses.dataclass(frozen=True)
class Output:
    """One greedy output; `tokens` as the server counted."""

    text: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`agreement` is the mean share of an output before it parts from the baseline (None without one).

    `partings` happened in `tokens` compared tokens; `chance` is how likely noise explains that many.
    `reasons` are `diverges`, `empty`, `repeats`: with any of them the output is wrong.
    """

    agreement: float | None
    divergences: int
    tokens: float
    noise_per_token: float | None
    chance: float | None
    reasons: tuple[str, ...]

    @property
    def wrong(self) -> bool:
        return bool(self.reasons)


def collect(target: Target, settings: AgreementSettings, prompts: PromptSpec, concurrency: int) -> list[Output]:
    """Greedy outputs of the fixed prompts, `concurrency` at a time (how many run together changes the numerics, so
    baselines are best collected at several). Raises NoAnswer or BadAnswer when the server does not answer as asked."""
    source = PromptSet(prompts, settings.context_tokens)
    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        return list(pool.map(lambda i: _ask(target, source.prompt(i), settings), range(settings.prompts)))
    finally:
        pool.shutdown(cancel_futures=True)  # after a bad answer nobody waits for the others


def judge(candidate: Sequence[Output], baselines: Sequence[Sequence[Output]], settings: AgreementSettings) -> Verdict:
    """Compare a configuration's outputs with several collections of the baseline's, prompt by prompt.

    Without baselines only silence and loops are looked for. With one, its noise is unknown and only `floor` excuses.
    """
    reasons = _defects(candidate, baselines)
    if not baselines:
        return Verdict(None, 0, sum(o.tokens for o in candidate), None, None, reasons)
    if any(len(run) != len(candidate) for run in baselines):
        raise UsageError("agreement: the outputs to compare come from different numbers of prompts")
    divergences, tokens, agreement = _partings(candidate, baselines)
    own = [_partings(run, [*baselines[:i], *baselines[i + 1:]]) for i, run in enumerate(baselines)
           if len(baselines) > 1]
    own_partings, own_tokens = sum(p for p, _, _ in own), sum(t for _, t, _ in own)
    noise = own_partings / own_tokens if own_tokens else None
    bound = _poisson_upper(own_partings) / own_tokens if own_tokens else 0.0
    allowed = max(settings.floor, settings.ratio * noise if noise else 0.0, bound if own_partings else 0.0)
    chance = poisson_tail(divergences, tokens * allowed)
    if chance < settings.alpha:
        reasons = ("diverges", *reasons)
    return Verdict(agreement, divergences, tokens, noise, chance, reasons)


def repeats(text: str) -> bool:
    """Whether a text ends in a loop: at least half of it (and 32 characters) is one piece of up to 64 characters
    four times or more."""
    for period in range(1, min(LOOP_PERIOD, len(text) // LOOP_REPEATS) + 1):
        length = period
        while length < len(text) and text[-length - 1] == text[-length - 1 + period]:
            length += 1
        if length >= max(32, len(text) / 2, LOOP_REPEATS * period):
            return True
    return False


def common_share(a: str, b: str) -> float:
    """How much of the longer of two texts passes before they part: 1 for equal texts."""
    if a == b:
        return 1.0
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(len(a), len(b))


def poisson_tail(count: int, mean: float) -> float:
    """P(K >= count) of a Poisson variable."""
    if count <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    term, below = math.exp(-mean), 0.0
    for k in range(count):
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1 - below)


def _partings(run: Sequence[Output], references: Sequence[Sequence[Output]]) -> tuple[int, float, float]:
    """(outputs that part from every reference, tokens until then or the end, mean share that agrees)."""
    divergences, tokens, shares = 0, 0.0, 0.0
    for i, output in enumerate(run):
        share = max(common_share(output.text, reference[i].text) for reference in references)
        shares += share
        divergences += share < 1
        tokens += max(1.0, share * output.tokens + (share < 1))
    return divergences, tokens, shares / len(run) if run else 1.0


def _poisson_upper(count: int) -> float:
    """The mean below which a Poisson variable would show more than `count` with 95 % probability, no less."""
    low, high = 0.0, 10.0 + 3 * count
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if poisson_tail(count + 1, middle) > NOISE_CONFIDENCE else (middle, high)
    return high


def _defects(candidate: Sequence[Output], baselines: Sequence[Sequence[Output]]) -> tuple[str, ...]:
    """Silence and loops that the baseline does not share."""
    found = []
    checks = (("empty", lambda text: not text.strip(), 0.1), ("repeats", repeats, 0.5 if not baselines else 0.1))
    for name, check, share in checks:
        bad = sum(1 for i, output in enumerate(candidate)
                  if check(output.text) and not any(check(run[i].text) for run in baselines if i < len(run)))
        if bad and bad >= max(2 if len(candidate) > 1 else 1, share * len(candidate)):
            found.append(name)
    return tuple(found)


def _ask(target: Target, prompt: Prompt, settings: AgreementSettings) -> Output:
    path, body = request_body(target, prompt, settings.output_tokens, 0.0, False, stream=False)
    try:
        answer = ask(target.base_url.rstrip("/") + path, body, within_s=settings.timeout_s, headers=auth(target))
        value = answer.json() if answer.status == 200 else {}
        told, text = error_in(value), completion_text(value)
        tokens = count(usage_of(value), "completion_tokens")
    except NoAnswer as error:
        raise NoAnswer(f"POST {path}: no answer: {error}", error.late) from error
    except BadAnswer as error:
        raise BadAnswer(f"POST {path}: bad answer: {error}") from error
    if told or answer.status != 200:
        raise BadAnswer(f"POST {path}: HTTP {answer.status}: {(told or answer.text)[:200]!r}")
    text = text[:settings.output_tokens * MOST_CHARS_PER_TOKEN]
    return Output(text, tokens or len(text.split()))
