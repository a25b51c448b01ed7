"""The agreement gate: a configuration that says something else than the baseline is wrong, however fast it is.

Outputs of the baseline are kept in outputs/STUDY/agreement.json; two collections at different concurrencies give
its own run-to-run disagreement. The statistics are in `measure/agreement.py`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

from autotune.loadgen.spec import PromptSpec, Target
from autotune.measure.agreement import AgreementSettings, Output, Verdict, collect, judge
from autotune.records import UsageError
from autotune.utils.files import read_plain, write_json
from autotune.utils.http import BadAnswer, NoAnswer

AT_ONCE = (1, 4)
"""Concurrencies of the baseline's collections."""
SETTING = {"prompts": "agreement.prompts", "output_tokens": "agreement.output_tokens",
           "context_tokens": "agreement.context_tokens", "seed": "workload.seed"}


@dataclasses.dataclass(frozen=True)
class Gate:
    """`file` keeps the baseline's outputs; `prompts` says what is asked."""

    file: pathlib.Path
    settings: AgreementSettings
    prompts: PromptSpec

    def references(self) -> list[list[Output]]:
        """The baseline's collections; [] when there are none (or unreadable ones) yet.

        Raises UsageError where something else was asked for them than is asked now: texts of other lengths part.
        """
        try:
            kept = json.loads(read_plain(self.file))
            before, runs = (kept["asked"], kept["runs"]) if isinstance(kept, dict) else ({}, kept)
            outputs = [[Output(str(text), int(tokens)) for text, tokens in run] for run in runs]
            before = {"prompts": len(outputs[0]), **before} if outputs else {}
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return []
        other = {name: before[name] for name, now in self._asked().items() if before.get(name, now) != now}
        if other or any(len(run) != self.settings.prompts for run in outputs):
            said = " ".join(f"{SETTING[name]}={value}" for name, value in other.items()) or "outputs of another number"
            raise UsageError(f"the baseline's outputs in {self.file} were made with {said}: set that back, or begin "
                             "another study with study.name=NAME")
        return outputs

    def _asked(self) -> dict[str, int]:
        return {"prompts": self.settings.prompts, "output_tokens": self.settings.output_tokens,
                "context_tokens": self.settings.context_tokens, "seed": self.prompts.seed}

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
        write_json(self.file, {"asked": self._asked(), "runs": [[[o.text, o.tokens] for o in run] for run in runs]})


def sentence(verdict: Verdict) -> str:
    """Why a verdict is wrong, for people and as the log excerpt of the crash."""
    told = {"diverges": f"greedy outputs part from the baseline's {verdict.divergences} times in {verdict.tokens:.0f} "
                        "tokens, far more often than the baseline from itself",
            "empty": "outputs are empty where the baseline's are not",
            "repeats": "outputs loop where the baseline's do not"}
    return "output_agreement: wrong output: " + "; ".join(told.get(reason, reason) for reason in verdict.reasons)
