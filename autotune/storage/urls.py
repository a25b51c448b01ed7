"""Where a study is kept: URLs, their drivers and passwords, and Optuna's storage for them.

    storage = open_storage("postgresql://user:secret@host/db", lost_after_s=120)
    hidden("postgresql://user:secret@host/db")  ->  "postgresql://[redacted]@host/db"
"""

from __future__ import annotations

import importlib.util
import pathlib
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autotune.records import HostCannotRun, UsageError
from autotune.utils.redact import Redactor

if TYPE_CHECKING:
    import optuna

BEATS = 8
"""Signs of life within the time after which a worker counts as dead."""
SECRET_KEYS = ("password", "sslpassword", "passfile")
SQLITE_WAIT_S = 10


def backend(url: str) -> str:
    """sqlite, postgresql, or whatever a URL begins with."""
    name = url.partition(":")[0].partition("+")[0].lower()
    return "postgresql" if name == "postgres" else name


def sqlite_file(url: str) -> pathlib.Path | None:
    """The file of a SQLite URL; None for a database in memory."""
    path = url.partition(":///")[2].partition("?")[0]
    return pathlib.Path(path) if path and path != ":memory:" else None


def sqlite_url(folder: pathlib.Path) -> str:
    """The default storage of a study folder."""
    return f"sqlite:///{folder / 'study.db'}"


def with_driver(url: str) -> str:
    """A PostgreSQL URL with the driver that is installed here: psycopg (extra `postgresql`), else psycopg2."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("postgresql", "postgres"):
        return url
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return f"postgresql+{driver}://{rest}"
    raise HostCannotRun("study.storage is a PostgreSQL database, and its driver is missing here: "
                        "pip install 'autotune-llm[postgresql]'")


def passwords(urls: Iterable[str | None]) -> list[str]:
    """Passwords in storage URLs, as written and as decoded."""
    import urllib.parse

    found: list[str] = []
    for url in urls:
        rest = (url or "").partition("://")[2]
        query = rest.partition("?")[2]
        found += [value for key, values in urllib.parse.parse_qs(query).items() if key in SECRET_KEYS
                  for value in values]
        before, at, _ = rest.partition("?")[0].rpartition("@")
        if at and ":" in before:
            found.append(before.partition(":")[2])
    return [text for one in found for text in dict.fromkeys((one, urllib.parse.unquote(one)))]


def hidden(url: str) -> str:
    """A storage URL for people to read, without its password."""
    scheme, separator, rest = url.partition("://")
    authority, question, query = rest.partition("?")
    before, at, place = authority.rpartition("@")
    if at and ":" in before:
        before = before.partition(":")[0] + ":***"
    return Redactor(passwords([url])).text(f"{scheme}{separator}{before}{at}{place}{question}{query}")


def open_storage(url: str, lost_after_s: float) -> optuna.storages.RDBStorage:
    """Optuna's storage; trials without a sign of life for `lost_after_s` seconds are stale in it.

    Raises UsageError for a URL that is none, HostCannotRun for a driver that is not installed, and for a database that
    does not answer what SQLAlchemy and its drivers raise.
    """
    import optuna
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    warnings.filterwarnings("ignore", message=".*heartbeat.*", category=optuna.exceptions.ExperimentalWarning)
    driven = with_driver(url)
    try:
        make_url(driven).get_dialect()().import_dbapi()
    except (ArgumentError, ValueError) as error:  # its words may hold part of a password
        raise UsageError(f"study.storage={hidden(url)} is no URL of a kind of database that is known here, such as "
                         "postgresql://USER@HOST/DB") from error
    except ImportError as error:
        raise HostCannotRun(f"study.storage={hidden(url)} needs a driver that is missing here: {error}") from error
    return optuna.storages.RDBStorage(
        driven, engine_kwargs=_engine_options(url), heartbeat_interval=max(1, int(lost_after_s / BEATS)),
        grace_period=max(2, int(lost_after_s)))


def _engine_options(url: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": SQLITE_WAIT_S}} if backend(url) == "sqlite" else {"pool_pre_ping": True}
