"""The tuning loop and everything that launches servers around it: confirmation, isolation, the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autotune.search.strategy import Launch, Pivot
    from autotune.storage.trial import TrialRecord


class ProgressListener(Protocol):
    """Follows the progress of a loop: a terminal, a log, a test."""

    def launching(self, number: int, step: Launch) -> None: ...
    def stage(self, text: str, after_s: float) -> None: ...
    def outcome(self, record: TrialRecord) -> None: ...
    def pivot(self, pivot: Pivot) -> None: ...
    def note(self, text: str) -> None: ...
