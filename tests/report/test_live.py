"""An exported script starts a real server that answers: the embedded engine, from another folder than the study's."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time

import httpx
import pytest

from autotune.engine.server import free_port
from autotune.export.launch_files import export
from tests.report.studies import Made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_exported_script_starts_a_server_that_answers(small: Made, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(["bash", str(export(small.settings, small.study))], cwd=tmp_path, stdout=output,
                                  stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, "PORT": str(port), "HOST": "127.0.0.1"})
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        healthy = False
        while not healthy:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                healthy = httpx.get(f"{address}/health", timeout=5, trust_env=False).status_code == 200
            time.sleep(0.5)
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "def main(", "max_tokens": 8}, timeout=60,
                            trust_env=False).json()
        assert answer["usage"]["completion_tokens"] > 0
        told = httpx.get(f"{address}/server_info", timeout=60, trust_env=False).json()
        assert told["tree_budget"] == small.study.records()[4].config["tree_budget"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
