"""Signs of life of the trials that this process runs, so that workers elsewhere can tell them from those of the dead.

Optuna's storage keeps the time of the last sign of each trial, by the database's own clock.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

LOG = logging.getLogger("autotune")


class Heartbeat:
    """`storage`: Optuna's, made with an interval and a grace period (`storage.open_storage`)."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self._trials: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, trial_id: int) -> None:
        """A first sign now, further ones until `remove`."""
        self.storage.record_heartbeat(trial_id)
        with self._lock:
            self._trials.add(trial_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
                self._thread.start()

    def remove(self, trial_id: int) -> None:
        with self._lock:
            self._trials.discard(trial_id)

    def silent(self, study_id: int) -> set[int]:
        """Ids of running trials whose last sign is too old, or that never gave one (asking gives the first)."""
        import optuna

        running = self.storage.get_all_trials(study_id, deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        stale = set(self.storage._get_stale_trial_ids(study_id))
        return stale | {t._trial_id for t in running if not self._ever(t._trial_id)}

    def _ever(self, trial_id: int) -> bool:
        from optuna.storages._rdb.models import TrialHeartbeatModel

        session = self.storage._backend.scoped_session()
        try:
            return TrialHeartbeatModel.where_trial_id(trial_id, session) is not None
        finally:
            session.rollback()
            session.close()

    def _beat(self) -> None:
        while True:
            time.sleep(self.storage.get_heartbeat_interval())
            with self._lock:
                trials = list(self._trials)
            for trial_id in trials:
                try:
                    self.storage.record_heartbeat(trial_id)
                except Exception as error:  # the database is away for a moment: the next sign may get through
                    LOG.warning("no sign of life for trial id %s: %s", trial_id, type(error).__name__)
