"""Files that are written whole (a kill, a full disk or a power cut leaves the old file or the new one) and read safely.

    write_json(folder / "owner.json", {"pid": 1})

Only the standard library is imported: the supervisor of a server must start fast.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import stat
from collections.abc import Iterable

from autotune.records import AutotuneError, UsageError

MOST_BYTES = 256 << 20  # of a file that is read as a whole


def write_json(path: pathlib.Path, value: object) -> None:
    """`write_text` of JSON; other types are written as their text."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_text(path: pathlib.Path, text: str, mode: int = 0o644) -> None:
    """`write_lines` of one piece."""
    write_lines(path, (text,), mode)


def write_lines(path: pathlib.Path, pieces: Iterable[str], mode: int = 0o644) -> None:
    """Replace `path` by the joined pieces (UTF-8), with these permissions, in a folder that exists.

    The data is synced before the rename. Raises OSError, and leaves the old file as it was.
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
    """The text (UTF-8, undecodable bytes replaced) of a plain file.

    Raises OSError, also for a pipe or device, which may never end, and for more than `most_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 20} MiB", str(path))
    return data.decode("utf-8", "replace")


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that takes only plain files and follows no link. Raises OSError."""
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


def last_bytes(path: pathlib.Path, most_bytes: int) -> bytes:
    """The end of a file, at most so much of it. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        return file.read()


def fresh(path: pathlib.Path) -> pathlib.Path:
    """`path`, after removing the file or link there. Raises OSError."""
    path.unlink(missing_ok=True)
    return path


def append_line(path: pathlib.Path, line: str) -> None:
    """Append a line with a single write, on a line of its own even after one that a kill cut off. Raises OSError."""
    with open(path, "ab+", opener=no_link) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        cut = size and file.read(1) != b"\n"
        file.write((b"\n" if cut else b"") + line.encode() + b"\n")


def output_path(given: str | None, default: pathlib.Path) -> pathlib.Path:
    """The path of an output: out=FILE, out=FOLDER (exists, or ends in a slash), or the default."""
    if not given:
        return default
    out = pathlib.Path(given).expanduser()
    return out / default.name if given.endswith("/") or out.is_dir() else out


def write_output(path: pathlib.Path, text: str, executable: bool = False) -> None:
    """Write `text` to `path` and make its folder. Raises UsageError, and AutotuneError for a full disk."""
    if path.exists() and not path.is_file():  # a rename would replace a device such as /dev/null for the whole host
        raise UsageError(f"cannot write {path}: it is there already and no regular file; the study is kept")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, 0o755 if executable else 0o644)
    except OSError as error:
        kind = AutotuneError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"cannot write {path}: {error.strerror or error}; the study is kept") from error
