"""What is read back from a study's database and the files beside it is of the types that were written, or refused.

    check_trial(record)                  # raises Damaged: one line that says where, and what belongs there
    check_study("s", study.user_attrs)
    pivots = [p for p in found if fits(PIVOT, p)]

Others write there too: people with an editor, other tools, strangers who send a study. What they add under names that
are none of ours is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.records import AutotuneError, Blame, Stage
from autotune.storage.retry import MEND
from autotune.storage.trial import TrialRecord
from autotune.utils.text import SPELLED, printable

LARGEST = 1e300
MOST_COUNT = 2**63
Shape = Callable[[Any], str]
"""What is wrong with a value, as "here: what belongs there"; "" when it fits."""


class CorruptStudy(AutotuneError):
    """A study holds what autotune did not write."""


def fits(shape: Shape, value: Any) -> bool:
    """Whether a value has a shape."""
    return not shape(value)


def _is(words: str, test: Callable[[Any], bool]) -> Shape:
    return lambda value: "" if test(value) else f": {words} belongs there, not {_short(value)}"


def _whole_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def _counted(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST_COUNT


NUMBER = _is("a finite number", _finite)
COUNT = _is("a whole number", _counted)
TEXT = _is("a text", _whole_text)
SWITCH = _is("true or false", lambda value: isinstance(value, bool))
CHOICE = _is("a text, number or truth value",
             lambda value: isinstance(value, bool) or _whole_text(value) or _finite(value))
STAGE = _is("a stage", lambda value: isinstance(value, str) and value in set(Stage))
BLAME = _is("a blame", lambda value: isinstance(value, str) and value in set(Blame))
PLANNED = _is("baseline or a trial's number",
              lambda value: value == "baseline" or isinstance(value, str) and value.isdecimal() and len(value) < 19)
ANYTHING = _is("anything", lambda value: True)


def maybe(shape: Shape) -> Shape:
    """The shape, or nothing (null)."""
    return lambda value: "" if value is None else shape(value)


def listed(shape: Shape, most: int | None = None) -> Shape:
    """A list of values of a shape, of at most so many."""
    def wrong(value: Any) -> str:
        if not isinstance(value, list | tuple) or most is not None and len(value) > most:
            return f": a list belongs there, not {_short(value)}"
        return next((f"[{at}]{told}" for at, item in enumerate(value) if (told := shape(item))), "")
    return wrong


def mapped(shape: Shape, key: Shape = TEXT) -> Shape:
    """A mapping from texts to values of a shape."""
    def wrong(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f": a mapping belongs there, not {_short(value)}"
        return next((f".{_short(name)}{told}" for name, item in value.items()
                     if (told := key(name) or shape(item))), "")
    return wrong


def each(shape: Shape, *names: str) -> dict[str, Shape]:
    """The same shape for each of these names."""
    return dict.fromkeys(names, shape)


def record(shapes: Mapping[str, Shape], needed: Mapping[str, Shape] | None = None, rest: Shape = ANYTHING) -> Shape:
    """A mapping with these keys, as far as they are there; those of `needed` are, others have the shape `rest`."""
    known, wanted = {**shapes, **(needed or {})}, tuple(needed or ())

    def wrong(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f": a mapping belongs there, not {_short(value)}"
        missing = next((name for name in wanted if name not in value), None)
        if missing is not None:
            return f".{missing} is missing"
        return next((f".{_short(name)}{told}" for name, item in value.items()
                     if (told := known.get(name, rest)(item))), "")
    return wrong


INTERVAL = maybe(listed(maybe(NUMBER), most=2))
CONFIG = mapped(CHOICE)
REGION = mapped(_is("a choice or a list of choices",
                    lambda value: fits(CHOICE, value) or fits(listed(CHOICE), value)))
PIVOT = record({
    **each(TEXT, "action", "reason", "reopens_when", "alternative", "key"),
    **each(COUNT, "after_launches", "launches_saved"),
    **each(maybe(NUMBER), "belief", "chance", "upper_gain", "cost_s"),
    "region": REGION, "trials": listed(COUNT), "signatures": listed(TEXT)})
"""A line of pivots.jsonl."""
ROW = record({}, {"config": TEXT, "ctx": COUNT, "concurrency": COUNT}, rest=maybe(CHOICE))
"""A row of matrix.json."""

FIGURES = ("tokens_per_s", "tokens_per_j", "watts", "joules", "energy_cross_check_j", "accept_length", "window_s",
           "output_agreement", "client_cpu_share", "cost_s", "launch_s", "objective",
           *(f"{what}_{of}_ms" for what in ("ttft", "tpot", "itl", "e2e") for of in ("p50", "p90", "p99", "mean")))
COUNTS = ("output_tokens", "requests", "errors", "prompt_tokens", "launch_id", "same_as", "neighbours", "confirm_after",
          "crash_exit_status")
TEXTS = ("energy_source", "energy_scope", "owner", "reason", "fail_reason", "resolved_key", "confirm", "isolates",
         "crash_category", "crash_signature", "crash_excerpt", "crash_explanation", "crash_next_step")
TRIAL: Mapping[str, Shape] = {
    **each(maybe(NUMBER), *FIGURES), **each(maybe(COUNT), *COUNTS), **each(maybe(TEXT), *TEXTS),
    **each(maybe(SWITCH), "energy_assumed", "energy_valid", "feasible", "crash_under_load"),
    **each(maybe(listed(TEXT)), "energy_reasons", "window_reasons", "invalid_reasons", "violated", "server_argv"),
    "relative_error": maybe(NUMBER), "limit_ratios": maybe(mapped(NUMBER)), "server_env": maybe(mapped(TEXT)),
    "resolved": maybe(mapped(ANYTHING)), "crash_stage": STAGE, "crash_blame": BLAME, "crash_after_s": maybe(NUMBER)}
"""Attributes of a trial (`history.measurement_attrs`, `history.crash_attrs`, `study`, `tune`)."""
OF_CRASH = ("crash_category", "crash_stage", "crash_blame", "crash_signature")
OF_ENDED = ("cost_s", "launch_s")

IDENTITY = record({
    **each(maybe(TEXT), "space", "space_digest", "engine", "engine_version", "engine_file", "objective"),
    "limits": maybe(mapped(NUMBER)), "model": maybe(mapped(TEXT)), "devices": maybe(listed(TEXT)),
    "workload": maybe(mapped(ANYTHING)), "slots": maybe(COUNT)})
PROVENANCE = record({
    **each(maybe(TEXT), "autotune", "python", "engine_version", "driver", "cpu", "kernel", "command", "folder",
           "created"),
    "packages": mapped(maybe(TEXT)), "gpu": listed(TEXT)})
GAIN = record({"gain": maybe(NUMBER), "interval": INTERVAL}, {"verdict": TEXT})
CONFIRMATION = record({
    **each(maybe(TEXT), "method", "decided", "reason"), **each(maybe(COUNT), "winner", "rounds", "blocks"),
    "gain": maybe(NUMBER), "interval": INTERVAL, "finalists": maybe(mapped(GAIN)),
    "configurations": mapped(CONFIG), "values": listed(ANYTHING)})
NEIGHBOURS = record({**each(listed(NUMBER), "alone", "beside"), "trials": listed(COUNT)},
                    {"count": COUNT, "change": maybe(NUMBER), "alone_apart": maybe(NUMBER)})
STUDY: Mapping[str, Shape] = {
    **each(maybe(TEXT), "strategy", "warm_start", "tuner"),
    "identity": maybe(IDENTITY), "provenance": maybe(PROVENANCE), "stop": maybe(record(each(TEXT, "kind", "reason"))),
    "barred": maybe(listed(record({}, {"when": mapped(listed(CHOICE)), "because": TEXT}))),
    "confirmation_plan": maybe(record({}, {"after_trials": COUNT, "configurations": mapped(CONFIG, PLANNED)})),
    "confirmation": maybe(CONFIRMATION), "neighbours": maybe(NEIGHBOURS)}
"""Attributes of a study."""


def check_trial(trial: TrialRecord, needed: bool = True) -> None:
    """Raises Damaged for attributes of another type than ours have, and for missing ones; `needed`: also for what only
    a study that goes on must know."""
    where = f"trial {trial.number}"
    for name, value in trial.attrs.items():
        if (shape := TRIAL.get(name)) is not None and (told := shape(value)):
            raise corrupt(f"{where}: {name}{told}")
    if told := CONFIG(trial.config):
        raise corrupt(f"{where}: params{told}")
    if trial.value is not None and not _finite(trial.value):
        raise corrupt(f"{where}: value: a finite number belongs there, not {trial.value}")
    wanted = (*(OF_CRASH if trial.crashed else ()),
              *(OF_ENDED if needed and trial.state in ("COMPLETE", "PRUNED") else ()))
    missing = [name for name in wanted if trial.attrs.get(name) is None]
    if missing:
        raise corrupt(f"{where} has no {missing[0]}, as if another program than autotune had made it")


def check_study(name: str, attrs: Mapping[str, Any]) -> None:
    """Raises Damaged for attributes of a study of another type than ours have."""
    for key, value in attrs.items():
        if (shape := STUDY.get(key)) is not None and (told := shape(value)):
            raise corrupt(f"study {name}: {key}{told}")


def corrupt(what: str) -> CorruptStudy:
    """The one line about what autotune did not write, and what to do."""
    told = printable(what, instead=SPELLED)
    return CorruptStudy(f"the study's database holds what autotune did not write ({told}), it is damaged: {MEND}")


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
