"""One worker at a time: proposing and asking are one step, so that no two workers choose the same launch.

    turns = Turns(url, "autotune study NAME")
    with turns.turn():
        ...                     # hear what the others did, propose, ask

On PostgreSQL this is an advisory lock of a connection of its own, on SQLite a locked file beside the database: both are
given back when their holder dies, however it dies. Threads of one process take turns as well; a turn within a turn is
the same turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import threading
import time
from collections.abc import Iterator

from autotune.records import AutotuneError
from autotune.storage.urls import backend, hidden, sqlite_file, with_driver
from autotune.utils.files import no_link

WAIT_S = 300.0
"""A turn takes a second or so: after this long its holder hangs, and we say so."""
POLL_S = 0.02
KEEPALIVE = ("tcp_keepalives_idle = 20", "tcp_keepalives_interval = 5", "tcp_keepalives_count = 4")
"""So that the server notices within a minute that a host lost its power during its turn."""


class StudyLock:
    """Turns of everybody who names the same storage and the same topic. Storages of other kinds: this process only."""

    def __init__(self, url: str, topic: str, wait_s: float = WAIT_S) -> None:
        self.url, self.topic, self.wait_s = url, topic, wait_s
        self._mutex = threading.RLock()
        self._depth = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Raises AutotuneError when nobody gets a turn for `wait_s` seconds, or the database cannot be reached."""
        with self._mutex:
            self._depth += 1
            try:
                if self._depth > 1:
                    yield
                    return
                with self._outer():
                    yield
            finally:
                self._depth -= 1

    def _outer(self) -> contextlib.AbstractContextManager[None]:
        if backend(self.url) == "postgresql":
            return self._advisory()
        file = sqlite_file(self.url) if backend(self.url) == "sqlite" else None
        return contextlib.nullcontext() if file is None else self._locked(file.with_name(file.name + ".turn"))

    @contextlib.contextmanager
    def _locked(self, path: pathlib.Path) -> Iterator[None]:
        deadline = time.monotonic() + self.wait_s
        try:
            file = os.fdopen(no_link(str(path), os.O_RDWR | os.O_CREAT), "r+")
        except OSError as error:
            raise AutotuneError(f"cannot open the study storage {hidden(self.url)}: {path}: "
                                f"{error.strerror or error}") from error
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise self._stuck() from None
                    time.sleep(POLL_S)
            yield

    @contextlib.contextmanager
    def _advisory(self) -> Iterator[None]:
        import sqlalchemy
        from sqlalchemy.pool import NullPool

        key = int.from_bytes(hashlib.sha256(self.topic.encode()).digest()[:8], "big", signed=True)
        engine = sqlalchemy.create_engine(with_driver(self.url), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        try:
            connection = engine.connect()
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise AutotuneError(f"cannot open the study storage {hidden(self.url)}: "
                                f"{str(error).strip().splitlines()[0][:200]}") from error
        with connection:
            for setting in (*KEEPALIVE, f"lock_timeout = '{int(self.wait_s * 1000)}ms'"):
                connection.execute(sqlalchemy.text(f"SET {setting}"))
            try:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
            except sqlalchemy.exc.DBAPIError as error:
                raise self._stuck() from error
            yield  # closing the connection ends the turn

    def _stuck(self) -> AutotuneError:
        return AutotuneError(f"no turn at the study storage {hidden(self.url)} for {self.wait_s:g} s: another worker "
                             "holds it and does not go on; end that one")
