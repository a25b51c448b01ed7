"""The NVML meter on a real GPU: run with -m gpu."""

from __future__ import annotations

import time

import pytest

from autotune.engine.gpus import visible_gpus
from autotune.power import open_meter
from autotune.power.meter import Powered, PowerSettings


@pytest.mark.gpu
def test_a_real_gpus_counter_and_its_sampled_power_agree() -> None:
    uuids = tuple(gpu.uuid for gpu in visible_gpus().gpus)
    settings = PowerSettings(source="nvml", watts_per_core=None, sample_s=0.1, max_gap_s=1.0, tolerance=0.1, others=1.0)
    meter, _ = open_meter(settings, Powered(None, uuids))
    with meter:
        time.sleep(1.0)
        start = meter.read()
        time.sleep(10.0)
        energy = meter.energy(start, meter.read())
    assert energy.joules and energy.watts and energy.watts > 10 * len(uuids)
    assert set(energy.per_device_j) == set(energy.power_limit_w) == set(energy.temperature_c) == set(uuids)
    assert energy.cross_check_j == pytest.approx(energy.joules, rel=0.2)
