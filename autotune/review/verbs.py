"""What the command line and the loop call: `report`, `export`, `annotate`, `attach`."""

from __future__ import annotations

from autotune.review.export import export
from autotune.review.notes import annotate, attach
from autotune.review.report import report

__all__ = ["annotate", "attach", "export", "report"]
