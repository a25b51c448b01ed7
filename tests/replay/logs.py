"""What the stand-in prints: lines as SGLang's, made up in its style, and how its ranks die."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence

FILE = pathlib.Path(__file__).with_name("deaths.yaml")
LIBRARY = "/opt/sglang/lib/python3.12/site-packages"
SHARDS = 62  # files of the checkpoint
RUNNER = "sglang/srt/model_executor/cuda_graph_runner.py"
BEGAN = time.time()


def say(text: str, told_s: float, writer: str = "") -> None:
    """One line of the log: `told_s` seconds after the start of the process by the replay's clock."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + told_s))
    print(f"[{stamp}{' ' + writer if writer else ''}] {text}", flush=True)


def _frames(*frames: Sequence[object]) -> str:
    """(file below site-packages, line, function, code) as a traceback's frames, outermost first."""
    return "".join(f'  File "{LIBRARY}/{file}", line {line}, in {function}\n    {code}\n'
                   for file, line, function, code in frames)


def death(name: str, gpu: int) -> str:
    """What a rank prints before it dies of `name` (deaths.yaml). Faults in graph capture come with SGLang's advice."""
    import yaml

    known = yaml.safe_load(FILE.read_text())
    dies = known["deaths"][name]
    exception = dies["exception"].format(gpu=gpu)
    text = (f"Scheduler hit an exception: Traceback (most recent call last):\n"
            f"{_frames(*known.get(dies.get('after'), ()), *dies['frames'])}{exception}\n")
    if dies.get("after") != "capture":
        return text
    again = _frames(*known["start"], (RUNNER, 418, "__init__", "raise Exception("))
    return (f"{text}\nDuring handling of the above exception, another exception occurred:\n\n"
            f"Traceback (most recent call last):\n{again}Exception: Capture cuda graph failed: "
            f"{exception.split(': ', 1)[1]}\n{known['advice']}")
