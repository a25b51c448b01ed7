"""Runs NVML meters over a scripted library, one per GPU and all at once, and prints what each reported as JSON.

Started by test_nvml.py with the stand-in for libnvidia-ml.so.1 on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time

import msgspec

from autotune.engine.gpus import start_nvml
from autotune.power import nvml as nvml_meter
from autotune.power import open_meter
from autotune.power.meter import DeviceLost, MeterUnavailable, Powered, PowerSettings

WINDOW_S = 2.0
SETTINGS = PowerSettings(source="nvml", watts_per_core=None, sample_s=0.05, max_gap_s=0.6, tolerance=0.05, others=1.0,
                         wait_s=0.0)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    nvml_meter.MIN_WINDOW_S, nvml_meter.PROCESS_CHECK_S = 1.5, 0.3
    state = pathlib.Path(os.environ["FAKE_NVML"])
    lines = state.read_text().replace("OURS", str(os.getpid()))
    state.write_text(lines)
    nvml = start_nvml()
    uuids = tuple(str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)))
                  for i in range(nvml.nvmlDeviceGetCount()))
    found: dict[str, object] = {"all": uuids, "refused": {}}
    with contextlib.ExitStack() as stack:
        meters = {}
        for uuid in (*uuids, "both"):
            gpus = tuple(uuids[:2]) if uuid == "both" else (uuid,)
            try:
                meters[uuid], _ = open_meter(SETTINGS, Powered(os.getpid(), gpus), folder / f"{uuid}.csv")
            except MeterUnavailable as error:
                found["refused"][uuid] = str(error)  # type: ignore[index]
                continue
            stack.enter_context(meters[uuid])
        time.sleep(0.2)
        starts = {uuid: meter.read() for uuid, meter in meters.items()}
        time.sleep(0.2)
        short = meters[uuids[0]].energy(starts[uuids[0]], meters[uuids[0]].read())
        time.sleep(WINDOW_S / 2)
        state.write_text(lines + "".join(f"{line[1:]}\n" for line in lines.splitlines() if line.startswith("~")))
        time.sleep(WINDOW_S / 2)
        found["short"] = msgspec.structs.asdict(short)
        for uuid, meter in meters.items():
            try:
                found[uuid] = msgspec.structs.asdict(meter.energy(starts[uuid], meter.read()))
            except DeviceLost as error:
                found[uuid] = {"lost": str(error)}
    print(json.dumps(found, default=dict))


if __name__ == "__main__":
    main()
