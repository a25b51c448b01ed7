"""The replay of the B300 story: autotune itself, with real processes, against a stand-in for SGLang on 8 fake GPUs.

    python -m tests.replay [FOLDER]      # what `make replay` runs; the study goes to FOLDER/b300_replay (outputs)

Real are the tuner, its supervisor and load client, the server's process tree and protocol, NVIDIA's binding and the
study; made up are what the server does (table.yaml), the library under the binding (tests/fakes/nvml.c) and the clock.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests.replay.clock import VARIABLE, Clock
from tests.replay.gpus import Gpus
from tests.replay.table import Table

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STUDY = "b300_replay"
STEPS: Sequence[Sequence[str]] = (["tune"], ["matrix", "config=best", "matrix.concurrency=[1,32,64,128]"], ["report"])
"""The verbs in their order, each with its overrides."""


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Variables under which autotune sees the replay: its GPUs, its SGLang, its spaces and its clock, all of `folder`.

    Raises SystemExit when there is no C compiler, or when this is no Linux.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        raise SystemExit("the replay compiles a stand-in for NVIDIA's library: it needs Linux and a C compiler (cc)")
    library = folder / "library"
    library.mkdir()
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o",
                    str(library / "libnvidia-ml.so.1"), str(ROOT / "tests" / "fakes" / "nvml.c")], check=True)
    spec = Table.load().spec
    Gpus(folder, Clock.create(folder, spec["pace"]), spec["gpus"]).idle()
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")}
    libraries = [str(library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(ROOT)]),
            "LD_LIBRARY_PATH": os.pathsep.join(libraries), "FAKE_NVML": str(folder / "nvml"), VARIABLE: str(folder),
            "AUTOTUNE_SPACES": str(HERE / "spaces"), "PYTHONUNBUFFERED": "1",
            "COLUMNS": os.environ.get("COLUMNS", "150")}


def replay(outputs: pathlib.Path, steps: Sequence[Sequence[str]] = STEPS) -> int:
    """Run the verbs one after the other, showing what they print and keeping it in terminal.txt; the exit code of the
    first that fails. An earlier replay in the same place is removed."""
    study = outputs / STUDY
    shutil.rmtree(study, ignore_errors=True)
    study.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, (study / "terminal.txt").open("w", 1) as record:
        env = environment(pathlib.Path(folder))

        def tell(text: str) -> None:
            print(text, end="", flush=True)
            record.write(text)

        tell("REPLAY: no GPU and no model is involved. A stand-in for SGLang behaves as tests/replay/table.yaml says; "
             "times are told by a clock that is put forward.\n")
        for verb, *overrides in steps:
            place = [] if outputs == ROOT / "outputs" else [f"outputs={outputs}"]
            command = [sys.executable, "-m", "autotune", verb, f"+space={STUDY}", *place, *overrides]
            tell(f"\n$ python {' '.join(command[1:])}\n")
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                                  cwd=ROOT) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        tell(line)
                except BaseException as ended:  # the tuner then stops its server and keeps the study
                    if not isinstance(ended, KeyboardInterrupt):  # Ctrl-C has reached it as well
                        process.terminate()
                    process.wait()
                    raise
            if process.returncode:
                tell(f"exit code {process.returncode}\n")
                return process.returncode
        script = study / "launch.sh"
        shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
        tell(f"\n$ cat {shown}\n{script.read_text()}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(replay(pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "outputs"))
