"""Optuna's own samplers behind the same protocol, for comparison: `tpe`, `random` and `grid`.

    strategy = Plain(space, "tpe", Limits(hours=8.0), seed=0)

One trial is one configuration, so nearly every trial pays for a launch: only a trial that happens to have the live
server's choices is measured without one. A crash is told as PRUNED with a constraint graded by how late it came, a
broken limit as a constraint, as facts and Optuna's sources suggest. The study lives in memory; observations told
without having been asked for (a resumed study) are added as finished trials.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from autotune.records import Blame, Config, Crash, Stage, UsageError, Value, config_key, server_key_of
from autotune.search.protocol import Best, Launch, Limits, Measured, Observation, Pivot, Stop, StopKind
from autotune.space import Param, Space

if TYPE_CHECKING:
    import optuna

SEVERITY = {Stage.ARG_PARSE: 4.0, Stage.GRAPH_CAPTURE: 2.0, Stage.WARMUP: 2.0, Stage.SERVING: 1.0}
"""Constraint violation told for a crash by stage; 3 for the stages not listed, 0.5 when nobody knows whose fault."""
