"""A database that is locked, full or gone for a while is asked again, so that a night's study outlives it.

    patience = Patience(wait_s=300)
    storage = patient(optuna.storages.RDBStorage(url), patience)
    patience.leave(storage)         # whoever was told to end does not wait so long, least of all for a lock of its own
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.records import AutotuneError

if TYPE_CHECKING:
    import optuna

LOG = logging.getLogger("autotune")
LEAVE_S = 3.0
FIRST_S, LONGEST_S = 0.2, 5.0
"""Pauses between two tries double from the first to the longest."""
CALLS = ("create_new_study", "set_study_user_attr", "set_study_system_attr", "get_study_id_from_name",
         "get_study_name_from_id", "get_study_directions", "get_study_user_attrs", "get_study_system_attrs",
         "get_all_studies", "create_new_trial", "_create_new_trial", "set_trial_param", "_set_trial_param",
         "set_trial_state_values", "set_trial_intermediate_value", "set_trial_user_attr", "set_trial_system_attr",
         "get_trial_user_attrs", "get_trial_system_attrs", "get_trial_id_from_study_id_trial_number", "get_trial",
         "get_all_trials", "_get_trials", "get_best_trial", "_get_best_trial_id")
"""What Optuna asks its storage, some of it past the public names. A sign of life is given again anyway: not these."""


READ_ALL = ("get_all_trials", "_get_trials", "get_study_user_attrs", "get_study_system_attrs")
"""Calls that name nothing that may not be there: an error of reading is one of what is stored."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
MEND = "Restore a backup or use study.name=NAME."


@dataclasses.dataclass
class RetryPolicy:
    """How long a database is asked again, in s."""

    wait_s: float

    def leave(self, storage: optuna.storages.BaseStorage) -> None:
        """No more patience than it takes to end, and nothing of a call that was interrupted holds the database.

        A signal in the midst of a transaction, and a second one while that is rolled back, leave it open: the next
        connection would wait for it.
        """
        self.wait_s = min(self.wait_s, LEAVE_S)
        with contextlib.suppress(Exception):
            storage.remove_session()


def patient(storage: optuna.storages.RDBStorage, patience: RetryPolicy) -> optuna.storages.RDBStorage:
    """`storage` itself, each call of which is made again, while the database is not there and there is patience.

    A call that still fails then raises AutotuneError with one line. Calls may be made twice where only the answer was
    lost: a new trial then has a twin that nobody owns, which the next start tells FAIL.
    """
    for name in CALLS:
        if hasattr(storage, name):
            setattr(storage, name, _again(name, getattr(storage, name), patience))
    return storage


def _again(name: str, call: Callable[..., Any], patience: RetryPolicy) -> Callable[..., Any]:
    import optuna

    @functools.wraps(call)
    def made(*args: Any, **options: Any) -> Any:
        began, pause, tries = time.monotonic(), FIRST_S, 0
        while True:
            try:
                return call(*args, **options)
            except optuna.exceptions.UpdateFinishedTrialError:
                if tries and name == "set_trial_state_values":
                    return True  # the try whose answer was lost had told it
                raise
            except AutotuneError:  # a call within this one has waited already
                raise
            except Exception as error:
                line = unanswered(error)
                if line is None and name in READ_ALL and isinstance(error, UNREADABLE):
                    raise AutotuneError(f"corrupt study database: unreadable ({type(error).__name__}: "
                                        f"{str(error)[:100]}). {MEND}") from error
                if line is None:
                    raise
                if time.monotonic() - began + pause > patience.wait_s:
                    raise AutotuneError(f"the study's database has not answered for {patience.wait_s:g} s ({line}): "
                                        "the study is kept, run the same command once it works again") from error
                LOG.warning("the study's database does not answer (%s): asking again", line)
            tries += 1
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)

    return made


def unanswered(error: BaseException | None) -> str | None:
    """One line of why the database did not do it, where another try may get through; None for all other faults."""
    from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError

    while error is not None:
        if isinstance(error, OperationalError | TimeoutError) or \
                (isinstance(error, DBAPIError) and error.connection_invalidated):
            return str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ECONNREFUSED):
            return str(error)
        error = error.__cause__
    return None
