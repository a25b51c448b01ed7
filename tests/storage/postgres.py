"""A private PostgreSQL server for slow tests: Debian's binaries, a cluster of its own, a free port on loopback."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from autotune.engine.server import free_port

USER, PASSWORD = "tuner", "s3cret/of+tests"


def binaries() -> pathlib.Path:
    """The folder of initdb and pg_ctl; skips the test where there is none."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    which = shutil.which("initdb")
    folder = pathlib.Path(found[-1]) if found else pathlib.Path(which).parent if which else None
    if folder is None or not (folder / "pg_ctl").exists():
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="needs pip install 'autotune-llm[postgresql]'")
    return folder


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a fresh database, password and all; the server is gone afterwards."""
    folder = binaries()
    place = pathlib.Path(tempfile.mkdtemp(prefix="autotune-pg-"))
    user = "postgres" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
    if user is not None:
        os.chown(place, pwd.getpwnam(user).pw_uid, -1)
    port = free_port()
    data, secret = place / "data", place / "password"

    def do(*command: str) -> None:
        done = subprocess.run(command, user=user, cwd=place, capture_output=True, text=True, timeout=120,
                              env={**os.environ, "HOME": str(place)})
        assert done.returncode == 0, done.stdout + done.stderr

    secret.write_text(PASSWORD + "\n")
    secret.chmod(0o644)
    do(str(folder / "initdb"), "-D", str(data), "-U", USER, "--pwfile", str(secret), "-A", "scram-sha-256",
       "-E", "UTF8", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={place}"
    do(str(folder / "pg_ctl"), "-D", str(data), "-l", str(place / "log"), "-o", options, "-w", "start")
    try:
        from urllib.parse import quote

        yield f"postgresql://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/postgres"
    finally:
        do(str(folder / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(place, ignore_errors=True)
