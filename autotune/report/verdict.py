"""The verdict in words: one headline, one sentence of support. Shared by every output."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from autotune.report.story import Conclusion, Limit, Story
from autotune.report.tested import Tested
from autotune.report.wording import (
    FIGURES,
    PHRASES,
    config_text,
    count,
    duration,
    figure_title,
    interval_text,
    limited,
    number,
    one_line,
    percent,
    with_unit,
)


def headline(story: Story) -> str:
    """The verdict in one sentence."""
    winner, gain, unit = story.winner, story.gain, story.unit
    if story.conclusion is Conclusion.NOTHING_MEASURED:
        return "No configuration could be measured."
    if winner is None or story.conclusion is Conclusion.NOTHING_FEASIBLE:
        return "No configuration keeps within the limits."
    if story.conclusion is Conclusion.NO_IMPROVEMENT:
        return "No improvement: keep the baseline."
    if story.conclusion is Conclusion.UNDECIDED:
        return f"Undecided: the confirmation of trial {winner.trial} ended without a decision."
    if is_baseline(story, winner):
        return "The baseline is the best configuration measured."
    if gain is None:
        return f"Trial {winner.trial} gives {with_unit(winner.value, unit)}; no baseline figure to compare with."
    what = PHRASES.get(story.objective, unit)
    if gain.share >= 1:
        words = f"Trial {winner.trial} gives {number(1 + gain.share, 3)} times the {what} of the baseline"
    else:
        more = "more" if gain.share >= 0 else "fewer"
        words = f"Trial {winner.trial} gives {percent(abs(gain.share))} {more} {what} than the baseline"
    return words + ("." if gain.confirmed else " (not confirmed).")


def support(story: Story) -> str:
    """What the headline rests on, in a sentence or two."""
    gain, confirmation = story.gain, story.confirmation
    words: list[str] = []
    if story.conclusion is Conclusion.NOTHING_MEASURED:
        crashed = count(story.counts.crashed, "trial")
        words.append(f"{crashed} of {story.counts.trials:,} crashed." if story.counts.trials else "No trial was run.")
        doubts = collections.Counter(r for record in story.records for r in record.attrs.get("invalid_reasons") or ())
        if doubts:
            told = ", ".join(f"{one_line(reason)} {n}" for reason, n in doubts.most_common(3))
            some = count(story.counts.invalid, "measurement")
            words.append(f"{some} may not be compared ({told}; docs/measurement.md).")
    elif story.conclusion is Conclusion.NOTHING_FEASIBLE:
        nearest = min(story.measured, key=lambda t: max(t.ratios.values(), default=float("inf")))
        broken = ", ".join(f"{name} {percent(nearest.ratios[name] - 1, signed=True)}" for name in nearest.violated)
        words.append(f"The nearest is trial {nearest.trial}" + (f", over its limits by {broken}." if broken else "."))
    elif story.confirmation:
        how = one_line(confirmation.get("method") or "re-measured in interleaved blocks")
        many = confirmation.get("blocks")
        words.append(how[:1].upper() + how[1:] + (f"; {count(many, 'block')}." if isinstance(many, int) else "."))
        if confirmation.get("reason") and story.conclusion is not Conclusion.IMPROVED:
            reason = one_line(confirmation["reason"])
            words.append(reason[:1].upper() + reason[1:] + ".")
        if gain is not None and story.conclusion is not Conclusion.NO_IMPROVEMENT:
            interval = interval_text(gain.low, gain.high)
            words.append(f"Gain {percent(gain.share, signed=True)}" + (f", {interval}." if interval else "."))
    elif gain is not None:
        interval = interval_text(gain.low, gain.high)
        words.append("From single measurements, so the best of many is flattered"
                     + (f"; {interval} within the windows alone." if interval else "."))
    if story.same_load is not None and story.winner is not None:
        load = config_text(story.space.split(story.winner.config)[1])
        words.append(f"Under the same load ({load}) the server alone gives {percent(story.same_load, signed=True)}.")
    if story.baseline is None and story.conclusion is not Conclusion.NOTHING_MEASURED:
        words.append("The baseline crashed." if story.baseline_crash else "The baseline was not measured.")
    elif story.baseline is not None and story.baseline.violated and story.winner is not None:
        words.append(f"The baseline breaks {', '.join(story.baseline.violated)}.")
    return " ".join(words)


def is_baseline(story: Story, entry: Tested) -> bool:
    return story.baseline is not None and entry.config == story.baseline.config


def label(story: Story, entry: Tested) -> str:
    """Whom a column of figures belongs to."""
    if is_baseline(story, entry):
        return "Baseline"
    return "Winner" if story.conclusion is Conclusion.IMPROVED else "Best"


def figure_rows(story: Story) -> list[tuple[str, str, str, str, str]]:
    """(figure, baseline, winner, change, limit): every known figure of the baseline and the winner, as text."""
    base, winner = story.baseline, story.winner
    limits = {limited(limit.name): limit for limit in story.limits}
    rows = []
    for name in [*FIGURES, *(n for n in limits if n not in FIGURES)]:
        title, unit = figure_title(name)
        a = base.figures.get(name) if base else None
        b = winner.figures.get(name) if winner else None
        if a is None and b is None and name not in limits:
            continue
        change = percent(b / a - 1, signed=True) if a and b is not None and winner is not base else ""
        limit = limits.get(name)
        bound = "" if limit is None else limit_words(limit)
        rows.append((title, with_unit(a, unit), with_unit(b, unit), change, bound))
    return rows


def limit_words(limit: Limit) -> str:
    """A limit with the winner's headroom."""
    least = "at least" if limit.name.startswith("min_") else "at most"
    return f"{least} {with_unit(limit.limit, figure_title(limit.name)[1])}{headroom(limit.ratio)}"


def headroom(ratio: float | None) -> str:
    """How far a measurement stays under its limit, for use after the limit."""
    if ratio is None:
        return ""
    return f" ({percent(1 - ratio)} headroom)" if ratio <= 1 else f" (over by {percent(ratio - 1)})"


def energy_words(entry: Tested | None) -> str:
    """Where the energy figure comes from, and whether it was assumed."""
    source = entry.energy_source if entry else None
    if source is None or source == "none":
        return "not measured"
    scope = entry.record.attrs.get("energy_scope") if entry else None
    told = source + (f" ({one_line(scope)})" if scope else "")
    return f"{told}, ASSUMED from a configured constant, not measured" if entry and entry.energy_assumed else told


def spent_words(story: Story) -> str:
    """Launches, crashes and time in one sentence."""
    counts, spent = story.counts, story.spent
    words = [f"{count(counts.launches, 'launch', 'launches')} ({counts.crashed_launches:,} crashed)",
             count(counts.trials, "trial"), f"{duration(spent.total_s)} of work"]
    if spent.launch_s:
        words.append(f"{duration(spent.launch_s)} of it starting servers")
    if spent.crashed_s:
        words.append(f"{duration(spent.crashed_s)} lost to crashes")
    return ", ".join(words)


def counts_words(story: Story) -> str:
    c = story.counts
    parts = [(c.feasible, "within limits"), (c.infeasible, "over a limit"), (c.invalid, "invalid"),
             (c.crashed, "crashed"), (c.failed, "failed through us"), (c.running, "running"),
             (c.copied, "the same server as another")]
    return ", ".join(f"{n:,} {what}" for n, what in parts if n) or "none"


def neighbour_words(story: Story) -> str:
    """What was measured side by side, and what that did to the baseline; "" where everything ran alone."""
    from autotune.tuning.interference import sentence

    beside = sum(bool(r.attrs.get("neighbours")) for r in story.records if not r.attrs.get("confirm"))
    if not beside:
        return ""
    told = sentence(dict(story.neighbours)) if story.neighbours else \
        "what that does to the baseline was not measured (parallel.check)"
    return f"{count(beside, 'trial', 'trials')} had others beside them, for screening only: {told}."


def stop_words(story: Story) -> str:
    reason = story.stop.get("reason")
    return one_line(reason) if reason else "still running, or interrupted"


def pivot_words(pivot: Mapping[str, Any]) -> str:
    """The evidence behind a pivot in one line."""
    parts = []
    if pivot.get("belief") is not None:
        parts.append(f"{percent(pivot['belief'])} sure that it always crashes")
    if pivot.get("chance") is not None:
        parts.append(f"{percent(pivot['chance'])} chance for its best launch")
    if pivot.get("upper_gain") is not None:
        parts.append(f"at most {percent(pivot['upper_gain'], signed=True)} to gain")
    if pivot.get("cost_s") is not None:
        parts.append(f"{duration(pivot['cost_s'])} a launch")
    if pivot.get("launches_saved"):
        parts.append(f"{count(int(pivot['launches_saved']), 'launch', 'launches')} saved")
    trials = pivot.get("trials")
    if trials:
        parts.append(f"trials {', '.join(str(t) for t in trials)}")
    return "; ".join(parts)


def change_words(factor: float, low: float | None, high: float | None) -> str:
    """A lever's factor as a change in per cent with its interval."""
    interval = range_words(low, high)
    return percent(factor - 1, signed=True) + (f" ({interval})" if interval else "")


def range_words(low: float | None, high: float | None) -> str:
    """An interval of factors as changes in per cent; empty when unknown."""
    if low is None or high is None:
        return ""
    return f"{percent(low - 1, signed=True)} to {percent(high - 1, signed=True)}"


def cell(value: Any) -> str:
    """One cell of the matrix table."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else one_line(value)
