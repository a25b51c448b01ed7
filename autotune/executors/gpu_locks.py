"""One study a GPU: a locked file for each, so that two tuners on one machine do not measure each other.

    with locked(gpus):
        ...

The kernel gives the locks back when their holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from autotune.engine.gpus import Gpu
from autotune.records import AutotuneError, digest


@contextlib.contextmanager
def locked(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Hold the locks of `gpus`. Raises AutotuneError naming who holds one of them."""
    with contextlib.ExitStack() as held:
        for gpu in sorted(gpus, key=lambda g: g.uuid):
            descriptor = _open(file_of(gpu))
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(descriptor, 100, 0).decode("utf-8", "replace").strip()
                raise AutotuneError(f"{gpu.hashed} is used by another autotune (pid {holder or 'unknown'}): wait for "
                                    "it, or choose other GPUs with CUDA_VISIBLE_DEVICES") from None
            with contextlib.suppress(OSError):  # somebody else's file may be locked, not written
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield


def file_of(gpu: Gpu) -> pathlib.Path:
    """The lock of one GPU, the same for every user of this machine."""
    return pathlib.Path(tempfile.gettempdir(), f"autotune-gpu-{digest(gpu.uuid, 16)}.lock")


def _open(path: pathlib.Path) -> int:
    """An open file at `path`, never through a link; made when absent, read-only where it belongs to somebody else."""
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    raise AutotuneError(f"cannot open {path}, the lock of a GPU: remove it if nobody uses that GPU")
