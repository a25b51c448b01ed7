"""The verdict in words, shared by every output: one headline, one sentence of support, figures with limits."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autotune.report.measured import FIGURES, Tested, config_text, figure_title
from autotune.report.story import GAINFUL, Conclusion, Gain, Limit, Story
from autotune.utils.text import count, duration, number, one_line, percent, with_unit

PHRASES = {"tokens_per_joule": "output tokens per joule", "tokens_per_s": "output tokens per second",
           "goodput_per_joule": "good output tokens per joule", "cost": "output tokens per unit of money"}


class Tile(NamedTuple):
    """A key figure: `was` is the baseline's, `change` the difference, `remark` a qualification."""

    title: str
    value: str
    was: str = ""
    change: str = ""
    tone: str = ""
    remark: str = ""


def headline(story: Story) -> str:
    """The verdict in one sentence."""
    winner, gain, unit = story.winner, story.gain, story.unit
    if story.conclusion is Conclusion.NOTHING_MEASURED:
        return "No configuration could be measured."
    if winner is None or story.conclusion is Conclusion.NOTHING_FEASIBLE:
        return "No configuration keeps every limit."
    if story.conclusion is Conclusion.NO_IMPROVEMENT:
        return "No improvement: keep the baseline."
    if story.conclusion is Conclusion.UNDECIDED:
        return f"Undecided: the confirmation of trial {winner.trial} ended without a decision."
    if story.is_baseline(winner):
        return "The baseline is the best configuration measured."
    if gain is None:
        return f"Trial {winner.trial} gives {with_unit(winner.value, unit)}; no baseline figure to compare with."
    what, load = PHRASES.get(story.objective, unit), config_text(story.space.split(winner.config)[1])
    base_load = config_text(story.space.split(story.space.baseline)[1])
    if gain.share >= 1:
        more, than = f"{number(1 + gain.share, 3)} times the {what}", "of"
    else:
        more, than = f"{percent(abs(gain.share))} {'more' if gain.share >= 0 else 'fewer'} {what}", "than"
    if gain.of == "load":
        words = f"Keep the baseline's server and run it at {load}: {more} {than} at {base_load}"
    elif load == base_load:
        words = f"Trial {winner.trial} gives {more} {than} the baseline"
    elif gain.of == "server":
        words = f"The server of trial {winner.trial} gives {more} {than} the baseline's under the same load, {load}"
    else:
        words = f"Trial {winner.trial} at {load} gives {more} {than} the baseline at {base_load}"
    return words + ("." if gain.confirmed else " (not confirmed).")


def support(story: Story) -> str:
    """The evidence behind the headline in a sentence or two."""
    gain, confirmation = story.gain, story.confirmation
    interval = interval_text(gain) if gain is not None else ""
    words: list[str] = []
    if story.conclusion is Conclusion.NOTHING_MEASURED:
        words.append(f"{count(story.counts.crashed, 'trial')} of {story.counts.trials:,} crashed."
                     if story.counts.trials else "No trial was run.")
        doubts = collections.Counter(one_line(reason) for record in story.records for reason in record.invalid_reasons)
        if doubts:
            reasons = ", ".join(f"{reason} {n}" for reason, n in doubts.most_common(3))
            words.append(f"{count(story.counts.invalid, 'measurement')} may not be compared ({reasons}; "
                         "docs/measurement.md).")
    elif story.conclusion is Conclusion.NOTHING_FEASIBLE:
        nearest = min(story.measured, key=lambda t: max(t.ratios.values(), default=float("inf")))
        broken = ", ".join(f"{name} {percent(nearest.ratios[name] - 1, signed=True)}" for name in nearest.violated)
        words.append(f"The nearest is trial {nearest.trial}" + (f", over its limits by {broken}." if broken else "."))
    elif story.confirmation:
        blocks = confirmation.get("blocks")
        words.append(_capital(confirmation.get("method") or "re-measured in interleaved blocks")
                     + (f"; {count(blocks, 'block')}." if isinstance(blocks, int) else "."))
        if confirmation.get("reason") and story.conclusion not in GAINFUL:
            words.append(f"{_capital(confirmation['reason'])}.")
        if gain is not None and story.conclusion is not Conclusion.NO_IMPROVEMENT:
            words.append(f"Gain {percent(gain.share, signed=True)}" + (f", {interval}." if interval else "."))
    elif gain is not None:
        words.append("From single measurements: the best of many is biased upwards"
                     + (f"; {interval} within the windows alone." if interval else "."))
    if gain is not None and gain.of == "server" and story.shares.load is not None and story.shares.both is not None:
        words.append(f"The load alone gives {percent(story.shares.load.share, signed=True)} on the baseline's server, "
                     f"both together {percent(story.shares.both.share, signed=True)}.")
    if story.conclusion is Conclusion.LOAD_ONLY:
        base_load = config_text(story.space.split(story.space.baseline)[1])
        for entry in story.measured:
            if (shares := story.confirmed_shares(entry)) is not None and shares.server is not None:
                words.append(f"The server of trial {entry.trial} gives {_gained(shares.server)} under that load" + (
                    f" and {_gained(shares.server_before)} at {base_load}." if shares.server_before else "."))
    if story.baseline is None and story.conclusion is not Conclusion.NOTHING_MEASURED:
        crashed = any(r.crashed and r.config == story.space.baseline for r in story.records)
        words.append("The baseline crashed." if crashed else "The baseline was not measured.")
    elif story.baseline is not None and story.baseline.violated and story.winner is not None:
        words.append(f"The baseline breaks {', '.join(story.baseline.violated)}.")
    return " ".join(words)


def _gained(gain: Gain) -> str:
    interval = interval_text(gain)
    return percent(gain.share, signed=True) + (f" ({interval})" if interval else "")


def finalist_words(story: Story, entry: Tested) -> str:
    """The standing of one of the best configurations after the confirmation; "" without one."""
    result = story.confirmed_gain(entry)
    if not story.confirmation or story.is_baseline(entry):
        return "winner" if entry is story.winner and story.confirmed else ""
    if not result:
        configurations = (story.confirmation.get("configurations") or {}).values()
        again = story.space.split(entry.config)[0] in [story.space.split(config)[0] for config in configurations]
        return "not re-measured: " + ("its server was, under another load" if again else
                                      "study.confirm takes the best servers first")
    words = "winner" if entry is story.winner and story.confirmed else str(result.get("verdict", "")).replace("_", " ")
    return words + (", but not told apart from the winner" if result.get("tied") else "")


def _capital(words: object) -> str:
    return one_line(words)[:1].upper() + one_line(words)[1:]


def tiles(story: Story, winner: Tested) -> list[Tile]:
    """Key figures of the winner beside the baseline's."""
    base, gain = story.reference, story.gain
    objective = Tile("Objective", with_unit(winner.value, story.unit))
    if base is not None and base is not winner and gain is not None:
        objective = objective._replace(
            was=with_unit(base.value, story.unit), change=percent(gain.share, signed=True),
            tone="good" if gain.confirmed and gain.share > 0 else "",
            remark="; ".join(filter(None, (interval_text(gain), "" if gain.confirmed else "not confirmed"))))
    power = "assumed, not measured" if winner.energy.assumed else energy_words(winner)
    power += "".join(f"; limit {with_unit(limit.limit, 'W')}{headroom(limit.ratio, limit.error)}"
                     for limit in story.limits if limit.name == "max_watts")
    found = [objective]
    tiled = {"tokens_per_s": "Throughput", "tokens_per_j": "Energy efficiency", "watts": "Power"}
    for name, title in tiled.items():
        unit = FIGURES[name][1]
        if name in winner.figures and unit != story.unit:
            now, before = winner.figures[name], base.figures.get(name) if base and base is not winner else None
            found.append(Tile(title, with_unit(now, unit), with_unit(before, unit) if before is not None else "",
                              percent(now / before - 1, signed=True) if before else "", "",
                              power if name == "watts" else ""))
    bounds = [(x.ratio, x.name) for x in story.limits  # a limit of 0 has no headroom
              if x.ratio is not None and (x.limit or x.ratio > 1)]
    if bounds:
        ratio, name = max(bounds, key=lambda x: x[0])
        found.append(Tile("Tightest limit", percent(1 - ratio) + " headroom", remark=name))
    elif not story.limits:
        found.append(Tile("Limits", "none set", remark="latency was not bounded"))
    return found


def limit_words(limit: Limit) -> str:
    """A limit with the winner's headroom."""
    least = "at least" if limit.name.startswith("min_") else "at most"
    return f"{least} {with_unit(limit.limit, figure_title(limit.name)[1])}{headroom(limit.ratio, limit.error)}"


def headroom(ratio: float | None, error: float | None = None) -> str:
    """Distance to a limit in brackets with its standard error, for use after the limit; "" when unknown."""
    if ratio is None:
        return ""
    known = "" if error is None else f" ± {percent(error)}"
    return f" ({percent(1 - ratio)}{known} headroom)" if ratio <= 1 else f" (over by {percent(ratio - 1)}{known})"


def energy_words(entry: Tested | None) -> str:
    """Source of the energy figure, marked when the figure was assumed."""
    if entry is None or entry.energy.source == "none":
        return "not measured"
    meter = entry.energy.source + (f" ({one_line(entry.energy.scope)})" if entry.energy.scope else "")
    return f"{meter}, ASSUMED from a configured constant, not measured" if entry.energy.assumed else meter


def roofline_words(story: Story) -> str:
    """The winner's distance from the roofline, with what that leaves out; "" where it is unknown."""
    limit, speed = story.roofline_tokens_per_s, story.winner.figures.get("tokens_per_s") if story.winner else None
    if not limit or not speed:
        return ""
    return (f"{percent(speed / limit)} of the {with_unit(limit, 'tok/s')} that memory bandwidth and arithmetic allow "
            "at this load, prefill, speculation, communication and the time between steps left out")


def spent_words(story: Story) -> str:
    """Launches, crashes and time in one sentence."""
    counts, spent = story.counts, story.spent
    words = [f"{count(counts.launches, 'launch', 'launches')} ({counts.crashed_launches:,} crashed)",
             count(counts.trials, "trial"), f"{duration(spent.total_s)} of work",
             f"{duration(spent.launch_s)} of it starting servers" if spent.launch_s else "",
             f"{duration(spent.crashed_s)} lost to crashes" if spent.crashed_s else ""]
    return ", ".join(filter(None, words))


def counts_words(story: Story) -> str:
    c = story.counts
    parts = {"within limits": c.feasible, "over a limit": c.infeasible, "invalid": c.invalid, "crashed": c.crashed,
             "failed in autotune": c.failed, "running": c.running, "the same server as another": c.copied}
    return ", ".join(f"{n:,} {what}" for what, n in parts.items() if n) or "none"


def stop_words(story: Story) -> str:
    return one_line(story.stop.get("reason") or "still running, or interrupted")


def launches_saved(story: Story) -> int:
    """Launches that the pivots avoided, by their own estimates."""
    return sum(int(p.get("launches_saved") or 0) for p in story.pivots if p.get("action") == "close")


def pivot_words(pivot: Mapping[str, Any]) -> str:
    """The evidence behind a pivot in one line."""
    known = {name: value for name, value in pivot.items() if value is not None}
    words: dict[str, Callable[[Any], str]] = {
        "belief": lambda v: f"{percent(v)} sure that it always crashes",
        "chance": lambda v: f"{percent(v)} chance for its best launch",
        "upper_gain": lambda v: f"at most {percent(v, signed=True)} to gain",
        "cost_s": lambda v: f"{duration(v)} a launch",
        "launches_saved": lambda v: f"{count(v, 'launch', 'launches')} saved" if v else "",
        "trials": lambda v: f"trials {', '.join(map(str, v))}" if v else ""}
    return "; ".join(shown for name, of in words.items() if name in known and (shown := of(known[name])))


def range_words(low: float | None, high: float | None) -> str:
    """An interval of factors as changes in per cent; empty when unknown."""
    return "" if low is None or high is None else f"{percent(low - 1, signed=True)} to {percent(high - 1, signed=True)}"


def interval_text(gain: Gain) -> str:
    """The interval of a gain with its level; empty when unknown."""
    shown = range_words(*(None if end is None else 1 + end for end in (gain.low, gain.high)))
    return f"{100 * gain.level:.3g} % interval {shown}" if shown else ""


def neighbour_words(story: Story) -> str:
    """Trials measured side by side and the effect on the baseline; "" where everything ran alone."""
    from autotune.tuning.confirm import interference_text

    beside = sum(bool(r.launch.neighbours) for r in story.records if not r.confirm)
    if not beside:
        return ""
    effect = interference_text(dict(story.neighbours)) if story.neighbours else \
        "what that does to the baseline was not measured (parallel.check)"
    return f"{count(beside, 'trial', 'trials')} ran beside others, for screening only: {effect}."
