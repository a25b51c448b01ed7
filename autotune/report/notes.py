"""What optuna-dashboard shows beside a trial: a Markdown note, and files as artifacts.

    attach(trial, artifacts, files)    # before the trial is told: a finished trial takes no artifacts
    annotate(study, record)            # after it was told

The dashboard (0.21) knows nothing of Optuna 5 constraints, so the note's first line says whether a trial is
feasible.
"""

from __future__ import annotations

import pathlib
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.measure.objective import UNITS
from autotune.records import Crash
from autotune.report.markdown import code, escape, fence
from autotune.report.wording import FIGURES, config_text, duration, one_line, percent, with_unit
from autotune.storage.trial import TrialRecord

if TYPE_CHECKING:
    import optuna

    from autotune.storage.study import Study

LARGEST = 4 * 2**20
"""Of a file above this many bytes only the end is kept as an artifact; all of it stays in launches/."""
EXCERPT = 6000
WIDEST = 120


def annotate(study: Study, record: TrialRecord) -> None:
    """Save the note of one finished trial. Unit and limits come from the study's identity."""
    import optuna
    from optuna_dashboard import save_note  # type: ignore[import-untyped]

    trial_id = study.inner._storage.get_trial_id_from_study_id_trial_number(study.inner._study_id, record.number)
    identity = study.attrs().get("identity") or {}
    unit = UNITS.get(str(identity.get("objective")), "")
    save_note(optuna.Trial(study.inner, trial_id), note(record, unit, identity.get("limits") or {}))


def attach(trial: optuna.Trial, artifacts: pathlib.Path, files: Iterable[pathlib.Path]) -> list[str]:
    """Copy files of a running trial into the artifact store; returns their ids. Absent and empty ones are left out."""
    from optuna.artifacts import FileSystemArtifactStore, upload_artifact

    artifacts.mkdir(parents=True, exist_ok=True)
    store = FileSystemArtifactStore(str(artifacts))
    with tempfile.TemporaryDirectory() as scratch:
        return [upload_artifact(artifact_store=store, file_path=str(_end(file, pathlib.Path(scratch))),
                                study_or_trial=trial)
                for file in files if file.is_file() and file.stat().st_size > 0]


def _end(file: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """The file itself, or a copy of its end when it is large."""
    size = file.stat().st_size
    if size <= LARGEST:
        return file
    with file.open("rb") as source:
        source.seek(size - LARGEST)
        (scratch / file.name).write_bytes(source.read(LARGEST))
    return scratch / file.name


def note(record: TrialRecord, unit: str, limits: Mapping[str, float]) -> str:
    """The note as Markdown."""
    attrs = record.attrs
    parts = [f"### {escape(standing(record))}", f"`{code(config_text(record.config))}`"]
    if record.crash is not None:
        parts += _crash(record.crash)
    elif record.state != "FAIL":
        parts += _figures(record, unit, limits)
    if attrs.get("fail_reason"):
        parts.append(f"The tuner failed, not the configuration: {escape(attrs['fail_reason'])}")
    if attrs.get("same_as") is not None:
        parts.append(f"The server resolved to the same one as in trial {attrs['same_as']}, whose outcome this is.")
    if attrs.get("server_argv"):
        parts += ["**Command**", fence(_command(attrs))]
    spent = [f"launch {record.launch_id}" if record.launch_id is not None else "",
             f"{duration(attrs['launch_s'])} to start" if attrs.get("launch_s") else "",
             f"{duration(attrs['cost_s'])} in all" if attrs.get("cost_s") is not None else ""]
    parts.append(", ".join(s for s in spent if s))
    return "\n\n".join(p for p in parts if p) + "\n"


def standing(record: TrialRecord) -> str:
    """A trial's standing in a few words, the first thing a reader needs."""
    attrs = record.attrs
    if record.crashed:
        return one_line(f"CRASHED at {attrs['crash_stage']}: {attrs['crash_category']}")
    if record.state == "FAIL":
        return "FAILED (not the configuration's fault)"
    if record.state in ("RUNNING", "WAITING"):
        return record.state.capitalize()
    if attrs.get("invalid_reasons") or record.value is None:
        return one_line(f"INVALID: {', '.join(attrs.get('invalid_reasons') or ['no value'])}")
    if attrs.get("violated"):
        return one_line(f"INFEASIBLE: breaks {', '.join(attrs['violated'])}")
    return "Feasible" if record.feasible else "INFEASIBLE"


def _figures(record: TrialRecord, unit: str, limits: Mapping[str, float]) -> list[str]:
    attrs = record.attrs
    ratios = attrs.get("limit_ratios") or {}
    rows = []
    if record.value is not None:
        error = attrs.get("relative_error")
        rows.append(f"| **Objective** | **{with_unit(record.value, unit)}**"
                    f"{f' ± {percent(error)}' if error is not None else ''} | |")
    for name, (title, of) in FIGURES.items():
        value = attrs.get(name)
        if isinstance(value, int | float):
            rows.append(f"| {title} | {with_unit(value, of)} | {_limit(name, of, limits, ratios)} |")
    out = ["\n".join(["| Figure | Measured | Limit |", "| --- | ---: | --- |", *rows])] if rows else []
    source = attrs.get("energy_source")
    if source:
        words = f"Energy: {escape(source)}"
        words += ", **assumed** from a configured constant" if attrs.get("energy_assumed") else ""
        reasons = attrs.get("energy_reasons") or []
        words += f"; not valid: {escape(', '.join(reasons))}" if reasons else ""
        out.append(words + ".")
    reasons = attrs.get("window_reasons") or []
    window = [f"window {duration(attrs['window_s'])}" if attrs.get("window_s") else "",
              f"{attrs['requests']:,} requests" if isinstance(attrs.get("requests"), int) else "",
              f"not comparable: {escape(', '.join(reasons))}" if reasons else ""]
    told = "; ".join(w for w in window if w)
    out.append(told[:1].upper() + told[1:] + "." if told else "")
    return out


def _limit(name: str, unit: str, limits: Mapping[str, float], ratios: Mapping[str, Any]) -> str:
    if name not in ratios and name not in limits:
        return ""
    shown = with_unit(limits[name], unit) if name in limits else ""
    ratio = ratios.get(name)
    if ratio is None:
        return shown
    room = f"**over by {percent(ratio - 1)}**" if ratio > 1 else f"{percent(1 - ratio)} headroom"
    return f"{shown} {room}".strip()


def _crash(crash: Crash) -> list[str]:
    facts = [f"signature `{code(crash.signature)}`", f"blame: {crash.blame}"]
    facts += [f"exit status {crash.exit_status}"] if crash.exit_status is not None else []
    facts += [f"after {duration(crash.after_s)}"] if crash.after_s is not None else []
    out = [", ".join(facts) + "."]
    out += [escape(crash.explanation)] if crash.explanation else []
    out += [f"**What to do:** {escape(crash.next_step)}"] if crash.next_step else []
    out += ["**From the log**", fence(wrapped(crash.excerpt[-EXCERPT:]))] if crash.excerpt.strip() else []
    return out


def _command(attrs: Mapping[str, Any]) -> str:
    argv: Sequence[str] = [str(a) for a in attrs["server_argv"]]
    env = [f"{k}={shlex.quote(str(v))}" for k, v in (attrs.get("server_env") or {}).items()]
    lines: list[list[str]] = [env] if env else []
    for i, arg in enumerate(argv):
        if i == 0 or arg.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(arg))
    return " \\\n  ".join(" ".join(line) for line in lines)


def wrapped(text: str) -> str:
    """Long lines broken: the dashboard lets a code block widen the whole page."""
    return "\n".join(line[i:i + WIDEST] for line in text.splitlines() for i in range(0, max(len(line), 1), WIDEST))
