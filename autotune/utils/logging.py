"""Our own log: structured lines, one file per run in outputs/STUDY/logs/, redacted; `-v` shows it to people."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable

from autotune.utils.files import fresh
from autotune.utils.redact import Redactor
from autotune.utils.text import KEPT, REPLACED, printable

LOG = logging.getLogger("autotune")
PLAIN = set(logging.makeLogRecord({}).__dict__)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, where, message, and whatever `extra` held."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
                 "level": record.levelname.lower(), "module": record.module, "message": record.getMessage()}
        entry |= {key: value for key, value in record.__dict__.items() if key not in PLAIN and key != "taskName"}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(self.redactor.data(entry), default=str)


class ForPeople(logging.Formatter):
    """Lines for a terminal: redacted, and without characters that would do something to it."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(module)s: %(message)s")
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return printable(self.redactor.text(super().format(record)), keep=KEPT, instead=REPLACED)


class Quiet(logging.FileHandler):
    """A log that cannot be written any more (a full disk) says nothing about it on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


def open_journal(folder: pathlib.Path, verbose: bool, secrets: Iterable[str] = ()) -> pathlib.Path:
    """Start this run's log file, free of `secrets`, and return its path. Raises OSError when it cannot be written."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    redactor = Redactor([*Redactor.from_command(sys.argv, os.environ).values, *secrets])
    for handler in list(LOG.handlers):
        LOG.removeHandler(handler)
        handler.close()
    written = Quiet(fresh(path))
    written.setFormatter(JsonLines(redactor))
    LOG.addHandler(written)
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    if verbose:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(ForPeople(redactor))
        LOG.addHandler(shown)
    return path
