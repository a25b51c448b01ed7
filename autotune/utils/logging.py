"""Our own log: redacted JSON lines, one file per run in outputs/STUDY/logs/; `-v` shows it on the terminal."""

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
STANDARD = set(logging.makeLogRecord({}).__dict__) | {"taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, module, message, and the fields of `extra`."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
                 "level": record.levelname.lower(), "module": record.module, "message": record.getMessage()}
        entry |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(self.redactor.data(entry), default=str)


class TerminalLines(logging.Formatter):
    """Lines for a terminal: redacted, and without control characters."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(module)s: %(message)s")
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return printable(self.redactor.text(super().format(record)), keep=KEPT, instead=REPLACED)


class QuietFileHandler(logging.FileHandler):
    """Drops a record that cannot be written (a full disk) instead of printing a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


def open_journal(folder: pathlib.Path, verbose: bool, secrets: Iterable[str] = ()) -> pathlib.Path:
    """Start this run's log file, free of `secrets`, and return its path. Raises OSError."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    redactor = Redactor([*Redactor.from_command(sys.argv, os.environ).values, *secrets])
    for old in list(LOG.handlers):
        LOG.removeHandler(old)
        old.close()
    LOG.addHandler(QuietFileHandler(fresh(path)))
    LOG.handlers[0].setFormatter(JsonLines(redactor))
    if verbose:
        LOG.addHandler(logging.StreamHandler(sys.stderr))
        LOG.handlers[1].setFormatter(TerminalLines(redactor))
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    return path
