"""Files under their final names are whole: written beside, then put in place at once.

    write_json(folder / "owner.json", {"pid": 1})

A kill, a full disk or a power cut leaves the old file or the new one. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterable

from autotune.records import AutotuneError, UsageError

MOST_BYTES = 256 << 20
"""Of a file of ours that is read as a whole."""


def write_json(path: pathlib.Path, value: object) -> None:
    """Write JSON; like `write_text`. What JSON does not know is written as its text."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_text(path: pathlib.Path, text: str, mode: int = 0o644) -> None:
    """Write text; like `write_lines`."""
    write_lines(path, (text,), mode)


def write_lines(path: pathlib.Path, pieces: Iterable[str], mode: int = 0o644) -> None:
    """Replace `path` by the joined pieces (UTF-8), with these permissions, in a folder that exists.

    The file is on the disk before it gets its name. Raises OSError; then the old file is still there and nothing of
    the new one.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with fresh(part).open("x", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read_plain(path: pathlib.Path, most_bytes: int = MOST_BYTES) -> str:
    """The text (UTF-8) of a plain file: no pipe, which would be waited for, and no device, which may have no end.

    Raises OSError, also for a file of more than `most_bytes`; undecodable bytes are replaced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 20} MiB", str(path))
    return data.decode("utf-8", "replace")


def free_mib(folder: pathlib.Path) -> float:
    """Space that is left for files in an existing folder, in MiB. Raises OSError."""
    return shutil.disk_usage(folder).free / 2**20


def no_link(path: str, flags: int) -> int:
    """An opener for `open`: only of plain files, and not through a link, which somebody may have left in a folder of
    ours. Raises OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{path} is a link: remove it", path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{path} is no plain file: remove it", path)


def fresh(path: pathlib.Path) -> pathlib.Path:
    """`path` without what was there before, be it a link: to be written anew. Raises OSError."""
    path.unlink(missing_ok=True)
    return path


def append_line(path: pathlib.Path, line: str) -> None:
    """Add a line to a file of lines with a single write; a line that a kill cut off before stays alone on its own."""
    with open(path, "ab+", opener=no_link) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        cut = size and file.read(1) != b"\n"
        file.write((b"\n" if cut else b"") + line.encode() + b"\n")


def output_path(given: str | None, default: pathlib.Path) -> pathlib.Path:
    """Where a file goes: out=FILE, out=FOLDER (which exists, or ends in a slash), or its default place."""
    if not given:
        return default
    out = pathlib.Path(given).expanduser()
    return out / default.name if given.endswith("/") or out.is_dir() else out


def write_output(path: pathlib.Path, text: str, executable: bool = False) -> None:
    """Write `text` to `path`, in a folder that is made when absent. Raises UsageError where it cannot,
    and AutotuneError where there is no room."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, 0o755 if executable else 0o644)
    except OSError as error:
        kind = AutotuneError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"cannot write {path}: {error.strerror or error}; the study is kept") from error
