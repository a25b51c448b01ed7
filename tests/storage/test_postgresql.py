"""Workers on one PostgreSQL study, on real processes. Needs Debian's postgresql and psycopg, else it is skipped."""

from __future__ import annotations

import glob
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator

import pytest

from autotune.config.compose import load
from autotune.engine.server import free_port
from autotune.records import AutotuneError
from autotune.storage.locks import StudyLock
from autotune.storage.study import Study
from tests.storage.test_study import held_elsewhere
from tests.tuning.test_loop import ROOT
from tests.tuning.test_worker import ended, nothing_twice, records, workers

pytestmark = pytest.mark.slow
USER, PASSWORD = "tuner", "s3cret/of+tests"
PATH = os.pathsep.join([*sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True), os.environ["PATH"]])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a fresh database, with its password, on a PostgreSQL server of its own."""
    pytest.importorskip("psycopg", reason="needs pip install 'autotune-llm[postgresql]'")
    initdb, pg_ctl = (shutil.which(name, path=PATH) for name in ("initdb", "pg_ctl"))
    if initdb is None or pg_ctl is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
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
    do(initdb, "-D", str(data), "-U", USER, "--pwfile", str(secret), "-A", "scram-sha-256",
       "-E", "UTF8", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={place}"
    do(pg_ctl, "-D", str(data), "-l", str(place / "log"), "-o", options, "-w", "start")
    try:
        yield f"postgresql://{USER}:{urllib.parse.quote(PASSWORD, safe='')}@127.0.0.1:{port}/postgres"
    finally:
        do(pg_ctl, "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(place, ignore_errors=True)


def leaks(folder: pathlib.Path) -> list[str]:
    """Files that hold the password, as written or as decoded."""
    words = [w.encode() for w in (PASSWORD, "s3cret%2Fof%2Btests")]
    return [str(p) for p in folder.rglob("*") if p.is_file() and any(w in p.read_bytes() for w in words)]


def test_two_workers_without_ray_measure_nothing_twice_and_tune_reports(tmp_path: pathlib.Path, url: str) -> None:
    said = ended(workers(tmp_path, 2, f"study.storage={url}"))
    found = records(tmp_path, url)
    nothing_twice(found)
    assert {r.state for r in found} <= {"COMPLETE", "PRUNED"}
    assert len({r.start.owner for r in found}) == 2, said
    again, = ended(workers(tmp_path, 1, f"study.storage={url}", "study.confirm.finalists=0", verb="tune"))
    assert len(records(tmp_path, url)) == len(found) and "launch script" in again
    assert leaks(tmp_path / "outputs") == [] and PASSWORD not in again + "".join(said)


def test_two_workers_run_the_embedded_engine_to_the_end(tmp_path: pathlib.Path, url: str) -> None:
    command = [sys.executable, "-m", "autotune", "worker", "+space=local", f"study.storage={url}",
               "study.name=embedded", "study.launches=4", "study.min_gain=0.05", "power=none", "objective=tokens_per_s",
               "space.params.dp.choices=[1]", "space.params.concurrency.choices=[1,4]"]
    both = [subprocess.Popen([*command, f"outputs={tmp_path / str(n)}"], cwd=tmp_path, text=True,
                             env={**os.environ, "PYTHONPATH": ROOT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for n in range(2)]  # folders of their own, as on two hosts
    said = ended(both)
    settings = load(command[4:], [])
    found = Study.open(url, "embedded", settings.space, {}, create=False).records()
    nothing_twice(found)
    assert {r.state for r in found} <= {"COMPLETE", "PRUNED"} and any(r.feasible for r in found), said
    numbers = {r.launch_id for r in found}
    assert len({(r.launch_id, r.start.owner) for r in found}) == len(numbers)  # numbers of hosts never meet
    assert leaks(tmp_path) == []


def test_a_turn_on_postgresql_is_given_back_by_the_dead(url: str) -> None:
    with held_elsewhere(url):
        began = time.monotonic()
        with pytest.raises(AutotuneError, match="timed out") as caught, StudyLock(url, "topic", wait_s=0.5).held():
            pass
        assert time.monotonic() - began < 60 and PASSWORD not in str(caught.value)
    with StudyLock(url, "topic", wait_s=20).held(), StudyLock(url, "another topic", wait_s=1).held():
        pass


def test_a_database_that_is_not_there_is_one_line_without_the_password(url: str, tmp_path: pathlib.Path) -> None:
    wrong = url.replace("/postgres", "/nowhere")
    process, = workers(tmp_path, 1, f"study.storage={wrong}")
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 1 and said.count("\n") == 1 and "cannot open the study storage" in said, said
    assert "s3cret" not in said and leaks(tmp_path / "outputs") == []
