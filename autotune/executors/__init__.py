"""Executors: where launches run. `base` is their contract; `local`, `parallel` and `ray` implement it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.executors.base import Executor


@contextlib.contextmanager
def open_executor(settings: Settings) -> Iterator[Executor]:
    """The executor of `executor=` and `parallel.slots`, after its preflight.

    Raises HostCannotRun with everything that is missing, AutotuneError when the Ray cluster does not answer.
    """
    if settings.executor.kind == "ray":
        from autotune.executors.ray import connected

        with connected(settings) as cluster:
            cluster.preflight()
            yield cluster
        return
    from autotune.executors.local import LocalExecutor
    from autotune.executors.parallel import side_by_side

    host = LocalExecutor(settings)
    report = host.preflight()
    executor = side_by_side(host)
    executor.report = report
    yield executor
