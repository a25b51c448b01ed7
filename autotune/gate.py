"""The agreement gate: a configuration that says something else than the baseline is wrong, however fast it is.

Outputs of the baseline are kept in outputs/STUDY/agreement.json; two collections at different concurrencies give
its own run-to-run disagreement. The statistics are in `measure/agreement.py`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

from autotune.answers import NoAnswer
from autotune.files import write_json
from autotune.framing import BadAnswer
from autotune.measure.agreement import AgreementSettings, Output, Verdict, collect, judge
from autotune.measure.spec import PromptSpec, Target

AT_ONCE = (1, 4)
"""Concurrencies of the baseline's collections."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """`file` keeps the baseline's outputs; `prompts` says what is asked."""

    file: pathlib.Path
    settings: AgreementSettings
    prompts: PromptSpec

    def references(self) -> list[list[Output]]:
        """The baseline's collections; [] when there are none (or unreadable ones) yet."""
        try:
            runs = json.loads(self.file.read_text(encoding="utf-8"))
            return [[Output(str(text), int(tokens)) for text, tokens in run] for run in runs]
        except (OSError, ValueError, TypeError):
            return []

    def check(self, target: Target, baseline: bool, hide: Callable[[str], str]) -> tuple[Verdict | None, str]:
        """(verdict, problem) for a live server; the baseline's outputs are kept when there are none yet.

        `hide` takes secrets out of a text: what a server says, it may have from its environment. `problem` is one line
        when the server did not answer as asked (verdict None).
        """
        try:
            if baseline and not self.references():
                self._keep([self._outputs(target, n, hide) for n in AT_ONCE])
            outputs = self._outputs(target, AT_ONCE[-1], hide)
        except (NoAnswer, BadAnswer) as error:
            return None, str(error)[:300]
        return judge(outputs, self.references(), self.settings), ""

    def _outputs(self, target: Target, at_once: int, hide: Callable[[str], str]) -> list[Output]:
        return [Output(hide(o.text), o.tokens) for o in collect(target, self.settings, self.prompts, at_once)]

    def _keep(self, runs: Sequence[Sequence[Output]]) -> None:
        write_json(self.file, [[[o.text, o.tokens] for o in run] for run in runs])


def sentence(verdict: Verdict) -> str:
    """Why a verdict is wrong, for people and as the log excerpt of the crash."""
    told = {"diverges": f"greedy outputs part from the baseline's {verdict.partings} times in {verdict.tokens:.0f} "
                        "tokens, far more often than the baseline from itself",
            "empty": "outputs are empty where the baseline's are not",
            "repeats": "outputs loop where the baseline's do not"}
    return "output_agreement: wrong output: " + "; ".join(told.get(reason, reason) for reason in verdict.reasons)
