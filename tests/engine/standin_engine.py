"""An engine of the stand-in process, for tests of process control and of the loop."""

from __future__ import annotations

import pathlib
from typing import Any

from autotune.engine.command import build
from autotune.engine.server import Server, ServerSettings, free_port
from autotune.engine.spec import EngineSpec
from autotune.space.space import Space

STANDIN = pathlib.Path(__file__).resolve().parents[1] / "fakes" / "standin.py"
ENGINE: dict[str, Any] = {
    "name": "standin",
    "command": ["{python}", str(STANDIN)],
    "args": [["--host", "{host}", "--port", "{port}"]],
    "params": {"fault": {"flag": "--fault"}, "at": {"flag": "--at"}, "speed": {"flag": "--tokens-per-s"},
               "flags": {"flag": "--flags"}, "after": {"flag": "--after"}},
    "ready": {"path": "/health", "log": "fired up and ready to roll"},
    "stages": [{"stage": "device-init", "log": "Init device"}, {"stage": "nccl-init", "log": "Init torch distributed"},
               {"stage": "load", "log": "Load weight begin"}, {"stage": "kv-alloc", "log": "Load weight end"},
               {"stage": "graph-capture", "log": "Capture cuda graph begin"},
               {"stage": "warmup", "log": "Warmup begin"}],
    "stop": {"term_s": 1.0},
}
SETTINGS = ServerSettings(stage_limit_s=20, stage_limits_s={}, ready_poll_s=0.1, request_timeout_s=5,
                          log_limit_mib=1, disk_free_mib=1, gpu_free_s=1)


def engine(**changes: Any) -> EngineSpec:
    return EngineSpec.parse({**ENGINE, **changes}, "standin")


def space(**choices: list[Any]) -> Space:
    """A space whose parameters have these choices; the first of each is the baseline."""
    return Space.parse({"name": "t", "engine": "standin", "params": {k: {"choices": v} for k, v in choices.items()},
                        "baseline": {k: v[0] for k, v in choices.items()}}, "test")


def server(folder: pathlib.Path, settings: ServerSettings = SETTINGS, **config: Any) -> Server:
    """A stand-in server for one configuration, not yet started."""
    port = free_port()
    made, spec = space(**{k: [v] for k, v in config.items()}), engine()
    return Server(build(spec, made, config, port=port), spec, folder, settings, port)
