"""Mutual exclusion of a study's workers, and the identity of the process that owns a trial.

The lock is an advisory lock of a connection of its own on PostgreSQL, and a locked file beside the database on SQLite:
both are released when their holder dies. Threads of one process exclude each other; a thread may hold it twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import socket
import threading
from collections.abc import Iterator

from autotune.engine.orphans import boot_id, start_time
from autotune.records import AutotuneError
from autotune.storage.database import backend, cannot_open, redacted, sqlite_file, with_driver
from autotune.utils.files import no_link

WAIT_S = 300.0  # the lock is held for about a second at a time: a holder that keeps it for longer is stuck
POLL_S = 0.02
# PostgreSQL notices within a minute that the holder's host lost power.
KEEPALIVE = ("tcp_keepalives_idle = 20", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 4")


class StudyLock:
    """One lock for all who name the same storage and topic. Other storages: this process only."""

    def __init__(self, url: str, topic: str, wait_s: float = WAIT_S) -> None:
        self.url, self.topic, self.wait_s = url, topic, wait_s
        self._mutex = threading.RLock()
        self._depth = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises AutotuneError after `wait_s` seconds, or when the database cannot be reached."""
        with self._mutex:
            self._depth += 1
            try:
                with self._acquired() if self._depth == 1 else contextlib.nullcontext():
                    yield
            finally:
                self._depth -= 1

    def _acquired(self) -> contextlib.AbstractContextManager[None]:
        if backend(self.url) == "postgresql":
            return self._advisory()
        file = sqlite_file(self.url)
        return contextlib.nullcontext() if file is None else self._locked(file.with_name(file.name + ".lock"))

    @contextlib.contextmanager
    def _locked(self, path: pathlib.Path) -> Iterator[None]:
        import filelock

        try:
            os.close(no_link(str(path), os.O_RDWR | os.O_CREAT))
            lock = filelock.FileLock(path)
            lock.acquire(self.wait_s, POLL_S)
        except filelock.Timeout:
            raise self._stuck() from None
        except OSError as error:
            raise AutotuneError(f"cannot open the study storage {redacted(self.url)}: {path}: "
                                f"{error.strerror or error}") from error
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _advisory(self) -> Iterator[None]:
        import sqlalchemy
        from sqlalchemy.pool import NullPool

        key = int.from_bytes(hashlib.sha256(self.topic.encode()).digest()[:8], "big", signed=True)
        engine = sqlalchemy.create_engine(with_driver(self.url), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        try:
            connection = engine.connect()
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise cannot_open(self.url, error) from error
        with connection:
            for setting in (*KEEPALIVE, f"lock_timeout = '{int(self.wait_s * 1000)}ms'"):
                connection.execute(sqlalchemy.text(f"SET {setting}"))
            try:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
            except sqlalchemy.exc.DBAPIError as error:
                raise self._stuck() from error
            yield  # closing the connection releases the lock

    def _stuck(self) -> AutotuneError:
        return AutotuneError(f"timed out after {self.wait_s:g} s waiting for the study lock: another worker is stuck; "
                             "stop it and retry")


def owner_id() -> str:
    """host|boot|pid|start time: identifies this process, also after its pid is used again."""
    return f"{_host()}|{boot_id()}|{os.getpid()}|{start_time(os.getpid())}"


def owner_alive(owner: str) -> bool:
    """True if the owner's process lives; owners on other hosts count as alive."""
    parts = owner.split("|")
    if not is_here(owner) or not parts[2].isdecimal():
        return len(parts) == 4 and not is_here(owner)
    return parts[1] == boot_id() and start_time(int(parts[2])) == parts[3]


def is_here(owner: str) -> bool:
    """True if the owner's process would be found on this host."""
    return owner.count("|") == 3 and owner.split("|")[0] == _host()


def _host() -> str:
    """This host and pid namespace: process ids of other containers mean nothing here."""
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"
