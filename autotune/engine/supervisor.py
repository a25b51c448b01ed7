"""The supervisor: one small process between the tuner and a server, so that neither leaves an orphan.

`python -m autotune.engine.supervisor` runs in a session of its own and reads one line of JSON from standard input. With
--apart it becomes a grandchild of its starter, because Ray's processes kill their children on exit. It

- starts the server in a session of its own and copies its output, redacted and bounded, to folder/server.log;
- reaps every descendant (Linux child subreaper), also children that leave the group or are orphaned;
- ends every process on SIGTERM, or when standard input closes: SIGTERM first, SIGKILL after `term_s`;
- writes folder/owner.json at the start and folder/exit.json at the end, and exits 0.

It imports no library, because it must start fast and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, BinaryIO

from autotune.engine.orphans import boot_id, kill, processes, start_time, stat_fields
from autotune.utils.files import fresh, write_json
from autotune.utils.redact import Redactor

PR_SET_CHILD_SUBREAPER = 36
FLUSH_S = 2.0
TAIL_BYTES = 4 << 20
KEY_BYTES = 16384  # longest private key; its lines wait for each other and are hidden together
LINE_BYTES = 65536  # a longer line is written in parts, cut where no secret is cut
OVERLAP_BYTES = 4096
FAILED = "supervisor: "  # begins `ended_by` of a supervisor that failed
TRIES = 15  # places to try for a cut
LONG = b"[autotune: %d bytes of a long line left out here]"
LEFT_OUT = b"\n[autotune: %d bytes of the log left out here]\n"


class BoundedLog:
    """A log file of at most `limit` bytes: the first half whole, then a gap, then the newest lines."""

    def __init__(self, path: pathlib.Path, limit: int, redactor: Redactor) -> None:
        self.file: BinaryIO = fresh(path).open("wb", buffering=0)
        self.head_limit = max(limit // 2, 4096)
        self.tail_limit = min(self.head_limit, TAIL_BYTES)
        self.redactor = redactor
        self.head = self.dropped = self.tail_size = self.skipped = 0
        self.tail: deque[bytes] = deque()
        self.rest = b""
        self.flushed = time.monotonic()

    def write(self, data: bytes) -> None:
        """Take raw output; whole lines are written, the rest waits for its end (at most LINE_BYTES).

        Output that cannot be written (a full disk) is lost: the server must not notice.
        """
        if self.skipped:  # within a line that could not be cut
            line, end, following = data.partition(b"\n")
            self.skipped += len(line)
            if not end:
                return
            data, self.skipped = LONG % self.skipped + end + following, 0
        data = self.rest + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        begun = data.rfind(b"-----BEGIN ", 0, cut)
        if begun >= 0 and b"PRIVATE KEY-----" in data[begun:begun + 60] and len(data) - begun < KEY_BYTES and \
                data.find(b"-----END", begun, cut) < 0:  # wait until the key is complete
            cut = max(data.rfind(b"\n", 0, begun), data.rfind(b"\r", 0, begun)) + 1
        if cut == 0 and len(data) > LINE_BYTES and not (cut := self._harmless_cut(data)):
            data, self.skipped = b"", len(data)
        self.rest = data[cut:]
        if cut:
            self._lines(data[:cut])

    def _harmless_cut(self, data: bytes) -> int:
        """Byte at which a long line may be cut; 0: nowhere.

        The cleaned parts make up the cleaned whole, and a possible beginning of a secret waits in the second part.
        """
        whole = self._clean(data)
        step = max(OVERLAP_BYTES, 2 * self.redactor.longest)
        for cut in range(len(data) - step, 0, -step)[:TRIES]:
            if self._clean(data[:cut]) + self._clean(data[cut:]) == whole:
                return cut
        return 0

    def _lines(self, lines: bytes) -> None:
        if self.head < self.head_limit:
            self.head += self._put(self._clean(lines))
            return
        self.tail.append(lines)
        self.tail_size += len(lines)
        while self.tail_size > self.tail_limit and len(self.tail) > 1:
            gone = len(self.tail.popleft())
            self.tail_size -= gone
            self.dropped += gone
        self.flush(not_before_s=FLUSH_S)

    def flush(self, not_before_s: float = 0.0) -> None:
        """Bring the file up to date: head, gap, tail. Does nothing within `not_before_s` of the last time."""
        if time.monotonic() - self.flushed < not_before_s:
            return
        self.flushed = time.monotonic()
        if self.tail:
            self.file.seek(self.head)
            self._put((LEFT_OUT % self.dropped if self.dropped else b"") + self._clean(b"".join(self.tail)))
            self.file.truncate()

    def close(self) -> None:
        self.rest += LONG % self.skipped if self.skipped else b""
        if self.rest:
            self._lines(self.rest)
        self.flush()
        self.file.close()

    def _put(self, data: bytes) -> int:
        """Write all of `data` as far as there is room; returns how much was written."""
        done = 0
        with contextlib.suppress(OSError):
            while done < len(data):
                done += self.file.write(memoryview(data)[done:]) or 0
        return done

    def _clean(self, lines: bytes) -> bytes:
        return self.redactor.text(lines.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def descendants() -> set[int]:
    """Pids of every descendant of this process, zombies included."""
    parents = {pid: int(fields[1]) for pid, fields in processes()}
    family = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return family - {os.getpid()}


def reap() -> dict[int, int]:
    """Collect ended children: pid -> return code as subprocess counts it (negative: killed by that signal)."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def end_all(term_s: float, main_pid: int) -> dict[int, int]:
    """End every descendant: SIGTERM, then SIGKILL after `term_s`. Returns the reaped: pid -> return code."""
    ended: dict[int, int] = {}
    with contextlib.suppress(OSError):
        os.killpg(main_pid, signal.SIGTERM)
    deadline = time.monotonic() + term_s
    while alive := descendants():
        late = time.monotonic() > deadline
        for pid in alive if late or main_pid not in alive else ():
            kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
        ended.update(reap())
    return ended


def supervise(order: dict[str, Any], control: int) -> int:
    """Run one server to its end, as the module's docstring says. `control` closes when the tuner is done or dead."""
    tuner_started = start_time(order["tuner"])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = pathlib.Path(order["folder"])
    log = BoundedLog(folder / "server.log", order["log_limit_bytes"], Redactor(order["secrets"]))
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        server = subprocess.Popen(order["argv"], cwd=order["cwd"], env=order["env"], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    except (OSError, ValueError) as error:  # a null character in an argument, an = in a variable's name
        log.write(f"autotune: cannot start the server: {error}\n".encode())
        log.close()
        _write_exit(folder, 127, "start")
        return 0
    output = server.stdout
    assert output is not None
    ended: dict[int, int] = {}
    ended_by = "itself"
    try:
        write_json(folder / "owner.json", {
            "boot": boot_id(), "supervisor": os.getpid(), "supervisor_started": start_time(os.getpid()),
            "tuner": order["tuner"], "tuner_started": tuner_started, "server": server.pid, "session": server.pid,
            "server_started": stat_fields(server.pid)[19].decode(), "marker": order["env"]["AUTOTUNE_LAUNCH"],
            "port": order["port"]})
        sources = [control, wake_read, output.fileno()]
        while server.pid not in ended:
            for source in select.select(sources, [], [], FLUSH_S)[0]:
                data = os.read(source, 65536)
                if source == output.fileno():
                    log.write(data) if data else sources.remove(source)
                elif source == control and not data:
                    asked_to_end.set()
                    sources.remove(control)
            log.flush(not_before_s=FLUSH_S)
            ended.update(reap())
            if asked_to_end.is_set():
                ended_by = "tuner"
                break
    except OSError as error:  # without owner.json the server could not be found again, so it is ended
        ended_by = f"{FAILED}{error}"
    finally:
        drained = threading.Thread(target=drain, args=(output, log), daemon=True)
        drained.start()
        left = len(descendants() - {server.pid})
        ended.update(end_all(order["term_s"], server.pid))
    drained.join(5)
    log.close()
    _write_exit(folder, ended.get(server.pid), ended_by, left if ended_by == "itself" else 0)
    return 0


def _write_exit(folder: pathlib.Path, exit_status: int | None, ended_by: str, left: int = 0) -> None:
    """Write exit.json; on a full disk only the exit status is lost. `left`: processes that outlived the server."""
    with contextlib.suppress(OSError):
        write_json(folder / "exit.json", {"exit_status": exit_status, "ended_by": ended_by, "left": left})


def drain(output: BinaryIO, log: BoundedLog) -> None:
    """Copy output to the log until every writer has closed the pipe."""
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(output.fileno(), 65536):
            log.write(data)


def step_apart() -> None:
    """Continue in a child; the parent only waits for it and may be killed."""
    child = os.fork()
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os._exit(max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def main() -> int:
    if "--apart" in sys.argv[1:]:
        step_apart()
    line = b""
    while not line.endswith(b"\n"):
        line += (data := os.read(0, 65536))
        if not data:
            return 1
    order = json.loads(line)
    try:
        return supervise(order, 0)
    except Exception as error:  # any failure here is no fault of the configuration
        _write_exit(pathlib.Path(order["folder"]), None, f"{FAILED}{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
