"""The correctness gate: greedy outputs compared with the baseline's, since a wrong configuration must not win.

Batching and other kernels change the last bits of the logits, so that two texts diverge now and then. That noise is
measured on the baseline itself, as divergences per token; a configuration is wrong when it diverges far more often, or
loops or falls silent where the baseline does not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NamedTuple

from msgspec import Meta

from autotune.loadgen.requests import PromptSet, complete
from autotune.loadgen.workload import PromptSpec, Target
from autotune.records import UsageError
from autotune.utils.files import read_plain, write_json
from autotune.utils.http import BadAnswer, NoAnswer
from autotune.utils.validation import AtLeastOne, Positive

CONCURRENCIES = (1, 4)  # of the baseline's two collections: how many run together changes the numerics
SETTINGS = {"prompts": "agreement.prompts", "output_tokens": "agreement.output_tokens",
            "context_tokens": "agreement.context_tokens", "seed": "workload.seed"}
PROBLEM_CHARS = 300
NOISE_CONFIDENCE = 0.95
LEAST_OUTPUTS = 2  # of a collection that ran out of time
LOOP_PERIOD = 64  # characters
LOOP_REPEATS = 4
MAX_CHARS_PER_TOKEN = 256  # text beyond this is ignored: no answer of so few tokens is so long


@dataclasses.dataclass(frozen=True)
class AgreementSettings:
    """`prompts` greedy outputs of `output_tokens` tokens each, from prompts of about `context_tokens` tokens.

    Divergences per token up to `floor`, or up to `ratio` times the baseline's own, are noise; more are wrong when
    noise explains them with a probability below `alpha`. `timeout_s` is for one output, `budget_s` for one collection:
    after that the outputs so far are compared, at least two.
    """

    prompts: AtLeastOne
    output_tokens: AtLeastOne
    context_tokens: AtLeastOne
    floor: Annotated[float, Meta(gt=0, lt=1, description="a share above 0 and below 1")]
    ratio: Annotated[float, Meta(ge=1, description="a number of at least 1")]
    alpha: Annotated[float, Meta(gt=0, lt=0.5, description="a number above 0 and below 0.5")]
    timeout_s: Positive
    budget_s: Positive


class Output(NamedTuple):
    """One greedy output; `tokens` by the server's count."""

    text: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Outputs compared with the baseline's. `agreement` is the mean share of an output before it diverges (None
    without a baseline). `divergences` happened in `tokens` compared tokens. `reasons` are `diverges`, `empty`,
    `repeats`: with any of them the output is wrong.
    """

    agreement: float | None
    divergences: int
    tokens: float
    reasons: tuple[str, ...]

    @property
    def wrong(self) -> bool:
        return bool(self.reasons)

    @property
    def problem(self) -> str:
        """One line on why the output is wrong, also the log excerpt of the crash."""
        texts = {"diverges": f"greedy outputs diverge from the baseline's {self.divergences} times in "
                             f"{self.tokens:.0f} tokens, far more often than the baseline from itself",
                 "empty": "outputs are empty where the baseline's are not",
                 "repeats": "outputs loop where the baseline's do not"}
        return "output_agreement: wrong output: " + "; ".join(texts[reason] for reason in self.reasons)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The gate of one study; `file` keeps the baseline's outputs."""

    file: pathlib.Path
    settings: AgreementSettings
    prompts: PromptSpec

    def references(self) -> list[list[Output]]:
        """The baseline's collections; [] when there are none yet, or unreadable ones.

        Raises UsageError when they were made with other settings: texts of other lengths diverge.
        """
        try:
            kept = json.loads(read_plain(self.file))
            before, runs = (kept["asked"], kept["runs"]) if isinstance(kept, dict) else ({}, kept)
            outputs = [[Output(str(text), int(tokens)) for text, tokens in run] for run in runs]
            before = {"prompts": len(outputs[0]), **before} if outputs else {}
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return []
        other = {name: before[name] for name, now in self._asked().items() if before.get(name, now) != now}
        if other or any(not run or len(run) > self.settings.prompts for run in outputs):
            said = " ".join(f"{SETTINGS[name]}={value}" for name, value in other.items()) or "outputs of another number"
            raise UsageError(f"the baseline's outputs in {self.file} were made with {said}: set that back, or begin "
                             "another study with study.name=NAME")
        return outputs

    def _asked(self) -> dict[str, int]:
        return {"prompts": self.settings.prompts, "output_tokens": self.settings.output_tokens,
                "context_tokens": self.settings.context_tokens, "seed": self.prompts.seed}

    def check(self, target: Target, baseline: bool, hide: Callable[[str], str],
              progress: Callable[[int, int], None] = lambda done, of: None) -> tuple[Agreement | None, str]:
        """(agreement, problem) of a live server; the baseline's outputs are kept when there are none yet.

        `hide` takes secrets out of a text: a server may echo its environment. `problem` is one line when the server
        did not answer (agreement None). `progress` gets the outputs so far, and how many are wanted.
        """
        wanted = self.settings.prompts * (1 + len(CONCURRENCIES) * (baseline and not self.references()))
        done = itertools.count(1)

        def outputs(at_once: int) -> list[Output]:
            return [Output(hide(o.text), o.tokens) for o in collect(
                target, self.settings, self.prompts, at_once, lambda: progress(next(done), wanted))]

        try:
            if baseline and not self.references():
                self._keep([outputs(at_once) for at_once in CONCURRENCIES])
            candidate = outputs(CONCURRENCIES[-1])
        except (NoAnswer, BadAnswer) as error:
            return None, " ".join(str(error).split())[:PROBLEM_CHARS]
        references = self.references()
        fewest = min(len(run) for run in (candidate, *references))
        return compare(candidate[:fewest], [run[:fewest] for run in references], self.settings), ""

    def _keep(self, runs: Sequence[Sequence[Output]]) -> None:
        write_json(self.file, {"asked": self._asked(), "runs": runs})


def collect(target: Target, settings: AgreementSettings, prompts: PromptSpec, concurrency: int,
            answered: Callable[[], None] = lambda: None) -> list[Output]:
    """Greedy outputs of the fixed prompts, `concurrency` at a time; of the first ones where `budget_s` is not enough.

    `answered` is called after each. Raises NoAnswer and BadAnswer.
    """
    source, begin = PromptSet(prompts, settings.context_tokens), time.monotonic()

    def output(index: int) -> Output | None:
        if index >= LEAST_OUTPUTS and time.monotonic() - begin > settings.budget_s:
            return None
        found = complete(target, source.prompt(index), settings.output_tokens, settings.timeout_s)
        text = found.text[:settings.output_tokens * MAX_CHARS_PER_TOKEN]
        answered()
        return Output(text, found.completion_tokens or len(text.split()))

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        found = itertools.takewhile(lambda one: one is not None, pool.map(output, range(settings.prompts)))
        return [one for one in found if one is not None]
    finally:
        pool.shutdown(cancel_futures=True)  # after a bad answer the others are not waited for


def compare(candidate: Sequence[Output], baselines: Sequence[Sequence[Output]],
            settings: AgreementSettings) -> Agreement:
    """Compare a configuration's outputs with several collections of the baseline's, prompt by prompt.

    Without baselines only silence and loops are found. With one, its noise is unknown and only `floor` is allowed.
    """
    reasons = _defects(candidate, baselines)
    if not baselines:
        return Agreement(None, 0, sum(o.tokens for o in candidate), reasons)
    divergences, tokens, agreement = _divergences(candidate, baselines)
    own = [_divergences(run, [*baselines[:i], *baselines[i + 1:]]) for i, run in enumerate(baselines)
           if len(baselines) > 1]
    own_divergences, own_tokens = sum(p for p, _, _ in own), sum(t for _, t, _ in own)
    allowed = settings.floor
    if own_divergences:
        noise = own_divergences / own_tokens
        allowed = max(allowed, settings.ratio * noise, _poisson_upper(own_divergences) / own_tokens)
    if poisson_tail(divergences, tokens * allowed) < settings.alpha:
        reasons = ("diverges", *reasons)
    return Agreement(agreement, divergences, tokens, reasons)


def repeats(text: str) -> bool:
    """True if half of a text, at least 32 characters, is one piece of up to 64 characters, four times or more."""
    for period in range(1, min(LOOP_PERIOD, len(text) // LOOP_REPEATS) + 1):
        length = period
        while length < len(text) and text[-length - 1] == text[-length - 1 + period]:
            length += 1
        if length >= max(32, len(text) / 2, LOOP_REPEATS * period):
            return True
    return False


def common_share(a: str, b: str) -> float:
    """Share of the longer of two texts before they diverge: 1 for equal texts."""
    if a == b:
        return 1.0
    return len(os.path.commonprefix((a, b))) / max(len(a), len(b))


def poisson_tail(count: int, mean: float) -> float:
    """P(K >= count) of a Poisson variable."""
    term, below = math.exp(-mean), 0.0
    for k in range(count):
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1 - below)


def _divergences(run: Sequence[Output], references: Sequence[Sequence[Output]]) -> tuple[int, float, float]:
    """(outputs that diverge from every reference, tokens until then or the end, mean share that agrees)."""
    shares = [max(common_share(output.text, other.text) for other in others)
              for output, *others in zip(run, *references, strict=True)]
    tokens = sum(max(1.0, share * output.tokens + (share < 1)) for share, output in zip(shares, run, strict=True))
    return sum(share < 1 for share in shares), tokens, sum(shares) / len(run) if run else 1.0


def _poisson_upper(count: int) -> float:
    """Upper 95 % confidence bound of a Poisson mean after `count` events."""
    low, high = 0.0, 10.0 + 3 * count
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if poisson_tail(count + 1, middle) > NOISE_CONFIDENCE else (middle, high)
    return high


def _defects(candidate: Sequence[Output], baselines: Sequence[Sequence[Output]]) -> tuple[str, ...]:
    """`empty` and `repeats`, where the baseline does not do the same."""
    found = []
    checks = (("empty", lambda text: not text.strip(), 0.1), ("repeats", repeats, 0.1 if baselines else 0.5))
    for name, check, share in checks:
        bad = sum(1 for i, output in enumerate(candidate)
                  if check(output.text) and not any(check(run[i].text) for run in baselines))
        if bad and bad >= max(2 if len(candidate) > 1 else 1, share * len(candidate)):
            found.append(name)
    return tuple(found)
