"""The study database: URLs, Optuna's storage with retries, and running trials with heartbeats.

This is the only module that uses names that Optuna does not publish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import logging
import pathlib
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from autotune.records import AutotuneError, HostCannotRun, UsageError
from autotune.storage.schema import REMEDY, CorruptStudy
from autotune.utils.redact import Redactor

if TYPE_CHECKING:
    import optuna

LOG = logging.getLogger("autotune")
BEATS = 8  # heartbeats within the time after which a worker counts as dead
SECRET_KEYS = ("password", "sslpassword", "passfile")
SQLITE_WAIT_S = 10
EXIT_WAIT_S = 3.0  # longest retry of a process that was told to end
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
# Methods of Optuna's storage that are retried, those that Optuna itself calls included. Heartbeats repeat anyway.
RETRIED = re.compile("_?(get|set|create)_(new_|all_|best_)?(study|studies|trial)(?!.*without_commit)")
# Methods that name no trial or study: their failure to read is one of the stored values.
READS_ALL = ("get_all_trials", "_get_trials", "get_study_user_attrs", "get_study_system_attrs")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)


def backend(url: str) -> str:
    """sqlite, postgresql, or another scheme of a URL."""
    name = url.partition(":")[0].partition("+")[0].lower()
    return "postgresql" if name == "postgres" else name


def sqlite_file(url: str) -> pathlib.Path | None:
    """The file of a SQLite URL; None for other databases and for one in memory."""
    path = url.partition(":///")[2].partition("?")[0]
    return pathlib.Path(path) if backend(url) == "sqlite" and path and path != ":memory:" else None


def sqlite_url(folder: pathlib.Path) -> str:
    """The default storage of a study folder."""
    return f"sqlite:///{folder / 'study.db'}"


def with_driver(url: str) -> str:
    """A PostgreSQL URL with the installed driver: psycopg (extra `postgresql`), else psycopg2."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("postgresql", "postgres"):
        return url
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return f"postgresql+{driver}://{rest}"
    raise HostCannotRun("study.storage is a PostgreSQL database, and its driver is missing here: "
                        "pip install 'autotune-llm[postgresql]'")


def passwords(urls: Iterable[str | None]) -> list[str]:
    """Passwords in storage URLs, as written and decoded."""
    import urllib.parse

    found: list[str] = []
    for url in urls:
        address, _, query = (url or "").partition("://")[2].partition("?")
        found += [value for key, value in urllib.parse.parse_qsl(query) if key in SECRET_KEYS]
        found.append(address.rpartition("@")[0].partition(":")[2])
    return [text for one in found if one for text in dict.fromkeys((one, urllib.parse.unquote(one)))]


def redacted(url: str) -> str:
    """A storage URL without its password."""
    return Redactor(passwords([url])).text(url)


def cannot_open(url: str, error: Exception, kind: str = "") -> AutotuneError:
    """One line for a database that cannot be opened."""
    line = (str(error).strip().splitlines() or [""])[0][:200]
    remedy = f". If it is corrupt: {REMEDY}" if backend(url) == "sqlite" else ""
    return AutotuneError(f"cannot open the study storage {redacted(url)}: {kind}{line}{remedy}")


@dataclasses.dataclass
class Retries:
    """Longest time, in s, for which a call is retried while the database is locked, full or unreachable."""

    wait_s: float

    def shorten(self, storage: optuna.storages.BaseStorage) -> None:
        """Shorten further retries for the exit of this process, and close an interrupted transaction.

        A signal during a transaction, and a second one during its rollback, leave it open: the next connection would
        wait for it.
        """
        self.wait_s = min(self.wait_s, EXIT_WAIT_S)
        with contextlib.suppress(Exception):
            storage.remove_session()


def open_storage(url: str, lost_after_s: float, retries: Retries) -> optuna.storages.RDBStorage:
    """Optuna's storage with retried calls; trials without a heartbeat for `lost_after_s` seconds are stale in it.

    A retried call may take effect twice: a trial made twice is failed at the next start. Raises UsageError for an
    unsupported URL, HostCannotRun for a missing driver, and exceptions of SQLAlchemy for a database that does not
    answer; a call that fails later raises AutotuneError.
    """
    import optuna
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    warnings.filterwarnings("ignore", message=".*heartbeat.*", category=optuna.exceptions.ExperimentalWarning)
    driven = with_driver(url)
    try:
        make_url(driven).get_dialect()().import_dbapi()
    except (ArgumentError, ValueError) as error:  # the error's text may hold part of a password
        raise UsageError(f"study.storage: unsupported URL {redacted(url)!r}; use sqlite:///FILE or "
                         "postgresql://USER@HOST/DB") from error
    except ImportError as error:
        raise HostCannotRun(f"study.storage: {redacted(url)} needs a driver that is missing here: {error}") from error
    options = {"connect_args": {"timeout": SQLITE_WAIT_S}} if backend(url) == "sqlite" else {"pool_pre_ping": True}
    storage = optuna.storages.RDBStorage(
        driven, engine_kwargs=options, heartbeat_interval=max(1, int(lost_after_s / BEATS)),
        grace_period=max(2, int(lost_after_s)))
    for name in filter(RETRIED.match, dir(storage)):
        setattr(storage, name, _retried(name, getattr(storage, name), retries))
    return storage


def _retried(name: str, call: Callable[..., Any], retries: Retries) -> Callable[..., Any]:
    import optuna
    import tenacity

    @functools.wraps(call)
    def retried(*args: Any, **options: Any) -> Any:
        try:
            for attempt in tenacity.Retrying(
                    retry=tenacity.retry_if_exception(lambda error: unanswered(error) is not None),
                    wait=tenacity.wait_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S),
                    stop=lambda state: tenacity.stop_before_delay(retries.wait_s)(state),
                    before_sleep=_log_retry, reraise=True):
                with attempt:
                    try:
                        return call(*args, **options)
                    except optuna.exceptions.UpdateFinishedTrialError:
                        if name == "set_trial_state_values" and attempt.retry_state.attempt_number > 1:
                            return True  # only the answer of the last attempt was lost
                        raise
        except Exception as error:
            if (line := unanswered(error)) is not None:
                raise AutotuneError(f"the study's database has not answered for {retries.wait_s:g} s ({line}): "
                                    "the study is kept, run the same command once it works again") from error
            if name in READS_ALL and isinstance(error, UNREADABLE):
                raise _unreadable(error) from error
            raise

    return retried


def _log_retry(state: Any) -> None:
    LOG.warning("the study's database does not answer (%s): asking again", unanswered(state.outcome.exception()))


def unanswered(error: BaseException | None) -> str | None:
    """One line for an error of the database after which a retry may succeed; None for other errors."""
    from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError

    while error is not None and not isinstance(error, AutotuneError):  # raised by a retried call within this one
        if isinstance(error, OperationalError | TimeoutError) or \
                (isinstance(error, DBAPIError) and error.connection_invalidated):
            return str(getattr(error, "orig", None) or error).strip().splitlines()[0][:200]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ECONNREFUSED):
            return str(error)
        error = error.__cause__
    return None


def trials_of(study: optuna.Study, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
    """Trials of a study, not copied. Raises CorruptStudy."""
    try:
        return study.get_trials(deepcopy=False, states=states or None)
    except UNREADABLE as error:  # Optuna's cache sorts the trials that the storage read
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> CorruptStudy:
    return CorruptStudy(f"unreadable ({type(error).__name__}: {str(error)[:100]})")


class RunningTrials:
    """Running trials of a study: those of this process send heartbeats, timed by the database's clock."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.storage: Any = study._storage  # Optuna's cache in front of an RDBStorage
        self._beating: set[int] = set()  # the thread copies it in one step
        self._thread: threading.Thread | None = None

    def create(self, template: optuna.trial.FrozenTrial) -> optuna.Trial:
        """A new trial, made with all attributes of `template` at once. Heartbeats begin now. Hold the study lock."""
        import optuna

        trial_id = self.storage.create_new_trial(self.study._study_id, template_trial=template)
        self.storage.record_heartbeat(trial_id)
        self._beating.add(trial_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return optuna.Trial(self.study, trial_id)

    def handle(self, trial: optuna.trial.FrozenTrial) -> optuna.Trial:
        import optuna

        return optuna.Trial(self.study, trial._trial_id)

    def ended(self, trial: optuna.Trial) -> None:
        self._beating.discard(trial._trial_id)

    def all(self) -> list[optuna.trial.FrozenTrial]:
        from optuna.trial import TrialState

        return trials_of(self.study, TrialState.RUNNING)

    def silent(self) -> set[int]:
        """Numbers of the running trials whose last heartbeat is too old or that never sent one."""
        import sqlalchemy
        from optuna.storages._rdb.models import TrialHeartbeatModel

        running, stale = self.all(), self.storage._get_stale_trial_ids(self.study._study_id)
        with self.storage._backend.engine.connect() as connection:
            beating = set(connection.scalars(sqlalchemy.select(TrialHeartbeatModel.trial_id))).difference(stale)
        return {trial.number for trial in running if trial._trial_id not in beating}

    def fail(self, trial: optuna.trial.FrozenTrial, why: str) -> bool:
        """Mark a running trial FAIL; False if it ended meanwhile."""
        import optuna

        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError, ValueError):
            self.storage.set_trial_user_attr(trial._trial_id, "fail_reason", why)
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            return True
        return False

    def _beat(self) -> None:
        while True:
            time.sleep(self.storage.get_heartbeat_interval())
            for trial_id in tuple(self._beating):
                try:
                    self.storage.record_heartbeat(trial_id)
                except Exception as error:  # the database may be away for a moment
                    LOG.warning("no heartbeat for trial id %s: %s", trial_id, type(error).__name__)
