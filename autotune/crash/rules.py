"""The known failures (rules.yaml), compiled, and their search in a log.

Every rule has a tier: cause, generic, symptom or echo. The lowest tier wins, then the earliest line, then the earlier
rule. Warnings, and matches of a strict rule outside an error statement, come after all tiers and count in the last
lines only. Advice and fall-backs never count.
"""

from __future__ import annotations

import bisect
import functools
import importlib.resources
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.crash.log import Block, Log
from autotune.records import Blame, Stage

TIERS = ("cause", "generic", "symptom", "end", "echo")
SYMPTOM, END, ECHO, ASIDE = 2, 3, 4, 5  # tiers as numbers; ASIDE: warnings
BEFORE, AFTER = 60, 30  # lines around a match that `near` and `unless` search
MATCHES = 40  # most matches of one pattern
LAST_LINES = 15  # distance from the end within which a warning may explain a failure
NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
STATES_ERROR = re.compile(r"\b(?:error|exception|fatal|fail(?:ed|ure)?|assert\w*|abort\w*|panic)\b|error:", re.I)


class Rule(NamedTuple):
    """One entry of the table. `stage` applies if the log implies none."""

    category: str
    tier: int
    strict: bool
    patterns: tuple[re.Pattern[str], ...]
    within: tuple[re.Pattern[str], ...]
    near: tuple[re.Pattern[str], ...]
    unless: tuple[re.Pattern[str], ...]
    stages: frozenset[Stage]
    stage: Stage | None
    blame: Blame
    blame_by_stage: Mapping[Stage, Blame]
    blame_also: tuple[Blame, ...]
    blame_why: str
    explanation: str
    next_step: str


class Found(NamedTuple):
    """A matching rule; `line` is the first match of its best pattern."""

    rule: Rule
    tier: int
    line: int
    text: str


class Table(NamedTuple):
    rules: tuple[Rule, ...]
    silent: Mapping[str, Rule]  # entries without patterns, by category: failures without an error in the log
    advice: tuple[re.Pattern[str], ...]
    aside: re.Pattern[str]
    ready: re.Pattern[str]
    markers: tuple[tuple[Stage, re.Pattern[str]], ...]
    frames: tuple[tuple[Stage, re.Pattern[str]], ...]
    grounds: Mapping[Blame, str]
    flags: Mapping[str, Mapping[str, Sequence[str]]]

    def find(self, log: Log, text: str, blocks: Sequence[Block], stage_at: Callable[[int], Stage | None],
             since: int = 0) -> Found | None:
        """The rule that explains the log from line `since` on.

        `text`: the log without advice. `stage_at(line)`: the stage that the log implies.
        """
        # lines that state an error: exceptions with their messages, lines of error level or with an error word
        errors = {i for block in blocks if block.at is not None for i in range(block.at, block.last + 1)}
        errors |= {i for i, line in enumerate(log.lines) if line.level == "error" or STATES_ERROR.search(line.text)}
        best, chosen = (ASIDE, len(log.lines)), None
        for rule in self.rules:
            if rule.tier <= best[0] and (
                    hits := list(self._hits(rule, log, text, blocks, errors, stage_at, since))):
                first = min((hit.tier, hit.line) for hit in hits)
                if first < best:
                    best = first  # patterns are ordered, the most specific first
                    chosen = next(hit for hit in hits if hit.tier == first[0])
        return chosen

    def advice_for(self, next_step: str, engine: str, text: str) -> str:
        """`next_step` with flags in the spelling of an engine ("": of all) that wrote the lower-case `text`."""
        def spelled(match: re.Match[str]) -> str:
            flags = self.flags[match[1]]
            if engine in flags:
                known = [flag for flag in flags[engine] if flag.strip("-").replace("-", "_") in text or flag in text]
                return (known or flags[engine])[0]
            return " or ".join(f"{flags[name][0]} ({said})" for name, said in NAMES.items() if name in flags)

        return re.sub(r"\{(\w+)\}", spelled, next_step)

    def only_echoes(self, text: str) -> bool:
        """True if a text only reports the end of another process."""
        return any(pattern.search(text) for rule in self.rules if rule.tier == ECHO for pattern in rule.patterns)

    def without_advice(self, text: str) -> str:
        """`text` with advice blanked out at the same length: advice names causes that did not happen."""
        for pattern in self.advice:
            text = pattern.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
        return text

    def _hits(self, rule: Rule, log: Log, text: str, blocks: Sequence[Block], errors: set[int],
              stage_at: Callable[[int], Stage | None], since: int) -> Iterator[Found]:
        for pattern in rule.patterns:
            for count, match in enumerate(pattern.finditer(text, log.start[since] if log.lines else 0)):
                if count == MATCHES:
                    break
                line = bisect.bisect_right(log.start, match.start()) - 1
                if rule.stages and (stage_at(line) or rule.stage) not in rule.stages:
                    continue
                if (rule.within or rule.near or rule.unless) and not _fits(rule, log, text, line, blocks):
                    continue
                quiet = log.lines[line].level in ("info", "warning") and rule.tier < SYMPTOM
                if line not in errors and self.aside.search(log.lines[line].text):
                    continue
                aside = quiet or (rule.strict and line not in errors)
                if aside and line < len(log.lines) - LAST_LINES:
                    continue
                yield Found(rule, ASIDE if aside else rule.tier, line, match[0])


def _fits(rule: Rule, log: Log, text: str, line: int, blocks: Sequence[Block]) -> bool:
    first, last = max(0, line - BEFORE), min(len(log.lines), line + AFTER)
    inside = [block for block in blocks if block.first <= line <= block.last]
    for block in inside:
        first, last = min(first, block.first), max(last, block.last + 1)
    around = log.part(text, first, last)
    if not all(p.search(around) for p in rule.near) or any(p.search(around) for p in rule.unless):
        return False
    whole = "".join(log.part(text, block.first, block.last + 1) for block in inside)
    return all(p.search(whole) for p in rule.within)


@functools.cache
def load() -> Table:
    """The packaged table, compiled once. Raises ValueError naming a malformed entry."""
    import yaml

    source = importlib.resources.files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8")
    return parse(yaml.load(source, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def parse(data: Mapping[str, Any]) -> Table:
    """A table from plain data. Raises ValueError naming a malformed entry."""
    words = data.get("words") or {}
    rules, silent, first_of = list[Rule](), dict[str, Rule](), dict[str, Rule]()
    for number, entry in enumerate(data["rules"], 1):
        try:
            rule = _rule(entry, first_of, words)
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise ValueError(f"rules.yaml: entry {number} ({entry.get('category')}): {error!r}") from error
        first_of.setdefault(rule.category, rule)
        if rule.patterns:
            rules.append(rule)
        else:
            silent[rule.category] = rule
    return Table(tuple(rules), silent, tuple(map(compiled, data["advice"])), re.compile("|".join(data["aside"]), re.I),
                 compiled("|".join(data.get("ready") or ["(?!)"])),
                 _stage_patterns(data["markers"]), _stage_patterns(data["frames"]),
                 {Blame(blame): " ".join(text.split()) for blame, text in data.get("grounds", {}).items()},
                 data.get("flags", {}))


def compiled(pattern: str, words: Mapping[str, str] | None = None) -> re.Pattern[str]:
    """Compile a pattern of the table for lower-cased text, which is faster than IGNORECASE.

    A blank matches any white space including line ends; `<name>` stands for the alternatives in `words`. The search
    time on a line is bounded (`forward`).
    """
    for name, alternatives in (words or {}).items():
        pattern = pattern.replace(f"<{name}>", f"(?:{alternatives})")
    lowered = re.sub(r"\\.|\(\?P<\w+>|[A-Z]", lambda m: m[0] if m[0][0] in "\\(" else m[0].lower(), pattern)
    return re.compile(forward(re.sub(r" (?![*+?{])", r"\\s+", lowered)), re.M)


def _stage_patterns(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[Stage, re.Pattern[str]], ...]:
    return tuple((Stage.parse(e["stage"]), compiled("|".join(f"(?:{p})" for p in e["any"]))) for e in entries)


def _rule(entry: Mapping[str, Any], first_of: Mapping[str, Rule], words: Mapping[str, str]) -> Rule:
    if unknown := set(entry) - ({*Rule._fields, "any"} - {"patterns"}):
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    first = first_of.get(entry["category"])
    explanation = entry.get("explanation") or (first.explanation if first else "")
    next_step = entry.get("next_step") or (first.next_step if first else "")
    if not explanation or not next_step:
        raise ValueError("explanation and next_step are needed in the first entry of a category")

    def patterns(key: str) -> tuple[re.Pattern[str], ...]:
        return tuple(compiled(pattern, words) for pattern in entry.get(key, ()))

    return Rule(
        category=entry["category"], tier=TIERS.index(entry.get("tier", "cause")),
        strict=bool(entry.get("strict", False)), patterns=patterns("any"), within=patterns("within"),
        near=patterns("near"), unless=patterns("unless"),
        stages=frozenset(Stage.parse(s) for s in entry.get("stages", ())),
        stage=Stage.parse(entry["stage"]) if "stage" in entry else None, blame=Blame(entry["blame"]),
        blame_by_stage={Stage.parse(s): Blame(b) for s, b in entry.get("blame_by_stage", {}).items()},
        blame_also=tuple(map(Blame, entry.get("blame_also", ()))),
        blame_why=" ".join(entry.get("blame_why", "").split()),
        explanation=" ".join(explanation.split()), next_step=" ".join(next_step.split()))


ANYTHING = r"[^\n]*"  # the rest of a line, in the table's patterns
# That, an escape, a character set, or a character.
TOKEN = re.compile(rf"{re.escape(ANYTHING)}(?![?+])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)


def forward(pattern: str) -> str:
    """`pattern` with bounded search time: each part after `[^\\n]*` is taken at its first occurrence.

        forward(r"assert[^\\n]*heads[^\\n]*== 0") == r"assert(?>[^\\n]*?heads)(?>[^\\n]*?== 0)"

    Without it, a long line would try every place of one part with every place of the next. The result matches the same
    lines, except where a part may end in the beginning of the next one.
    """
    parser: Any = re._parser  # type: ignore[attr-defined]
    alternatives, depth = [[""]], 0  # of each, the parts between ANYTHING outside groups
    for token in TOKEN.findall(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 0 and token == "|":
            alternatives.append([""])
        elif depth == 0 and token == ANYTHING:
            alternatives[-1].append("")
        else:
            alternatives[-1][-1] += token
    return "|".join(first + "".join(
        f"(?>{ANYTHING}?{part})" if parser.parse(part).getwidth()[0] else ANYTHING + part for part in rest)
        for first, *rest in alternatives)
