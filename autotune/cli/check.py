"""The text of the verb check: where a study is kept, one configuration's command, and everything against running it."""

from __future__ import annotations

import dataclasses

from autotune.config.settings import Settings
from autotune.engine.command import shown as command_line
from autotune.engine.host import installed
from autotune.engine.spec import text
from autotune.executors.preflight import Preflight
from autotune.records import Config
from autotune.storage.database import backend, redacted, sqlite_file, sqlite_url
from autotune.utils.redact import Redactor
from autotune.utils.text import SPELLED, printable

BASELINE = "baseline"


def version_unknown(settings: Settings) -> str:
    """The reason for an unknown version of the engine, for people."""
    if installed(settings.engine).asked:
        return "(version unknown)"
    return (f"(version not asked: the engine file names its own interpreter, {settings.engine.python}, which runs only "
            "with the engine; give engine.python=PATH or engine.version.use=VERSION)")


def where(settings: Settings, side_by_side: int) -> list[str]:
    """Two lines: where the study is kept, and where its launches are made."""
    url = settings.study.storage or sqlite_url(settings.folder)
    file = sqlite_file(url) if backend(url) == "sqlite" else None
    begun = "" if file is None else " (there already: tune resumes it)" if file.exists() else " (not begun yet)"
    if settings.executor.kind == "ray":
        launches = (f"by Ray at {settings.executor.address}, up to {settings.executor.at_once} side by side "
                    "(executor=ray); what is said here is about this host alone")
    else:
        count = "one at a time" if side_by_side == 1 else f"up to {side_by_side} side by side"
        launches = f"on this host, {count} (executor=local, parallel.slots={settings.parallel.slots})"
    return [f"study    {settings.study_name}, in {settings.folder}, kept in {redacted(url)}{begun}",
            f"launches {launches}"]


def shown(report: Preflight, settings: Settings, side_by_side: int = 1, label: str = BASELINE,
          config: Config | None = None) -> str:
    """The report on `config` (None: the baseline) as plain text, without secrets. `label` names it."""
    called = f"the {label}" if label in (BASELINE, "best") else label
    redactor = Redactor([*Redactor.from_command(report.command.argv, report.command.env).values,
                         *settings.redactor.values])
    command = dataclasses.replace(report.command, argv=tuple(redactor.argv(report.command.argv)), env={
        name: str(value) for name, value in redactor.mapping(report.command.env).items()})
    described = " ".join(settings.space.describe.split())  # on one line: more could pass for lines of ours
    lines = [f"space    {settings.space.name}: {described or settings.space.engine}",
             f"engine   {settings.engine.name} {report.version or version_unknown(settings)}",
             f"GPUs     {', '.join(g.hashed for g in report.gpus.gpus) or report.gpus.why_none}",
             *where(settings, side_by_side),
             f"{label:8} {', '.join(f'{k}={text(v)}' for k, v in (config or settings.space.baseline).items())}",
             "", f"command of {called}:", "  " + command_line(command), ""]
    if report.problems:
        lines += [f"{called} cannot run here:", *(f"  - {p}" for p in report.problems), ""]
    else:
        lines += [f"{called} can run here.", ""]
    lines.append("choices:")
    for param in settings.space.params:
        lines.append(f"  {param.name}" + (" (load, changed on a live server)" if param.load else ""))
        for value in param.choices:
            found = "; ".join(report.choices.get((param.name, value), ()))
            state = found or ("ok" if param.load or not report.problems else "once the above is mended")
            lines.append(f"    {text(value):24} {state}")
    if settings.space.rules:
        lines += ["", "never launched together:"]
        for rule in settings.space.rules:
            together = " + ".join(f"{k}={'|'.join(text(x) for x in v)}" for k, v in rule.when.items())
            lines.append(f"  {together}: {rule.because}")
    return "\n".join(printable(redactor.text(line), instead=SPELLED) for line in lines)
