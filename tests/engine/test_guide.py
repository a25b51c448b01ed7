"""The files that docs/engines.md tells people to write for an engine of their own."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

from autotune.__main__ import main
from autotune.config.compose import load

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "engines.md"


def test_the_files_of_the_guide_are_an_engine_and_a_space_that_check_accepts(tmp_path: pathlib.Path) -> None:
    section = GUIDE.read_text().partition("## Add an engine")[2].partition("\n## ")[0]
    engine, space = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "mine/engine").mkdir(parents=True)
    (tmp_path / "mine/engine/acme.yaml").write_text(engine)
    (tmp_path / "mine/acme_try.yaml").write_text(space)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (program := tmp_path / "acme-server").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    given = ["+space=acme_try", f"space.model.target={tmp_path / 'model'}", f"engine.command=[{program}]"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["check", "--spaces", str(tmp_path / "mine"), *given, f"outputs={tmp_path}", "device=cpu"])
    assert status == 0, said.getvalue()
    assert "--tensor-parallel 1 --max-batch 32 --no-prefix-cache" in said.getvalue()
    loaded = load([*given, "engine.version.use=2.0"], [str(tmp_path / "mine")])
    refused = loaded.space.forbidden({**loaded.space.baseline, "tp": 2, "prefix_cache": True})
    assert refused is not None and "acme-server refuses" in refused
