"""GPUs of a host whose NVML starts and then fails."""

from __future__ import annotations

from unittest import mock

import pytest

from autotune.engine import gpus


class NVMLError(Exception):
    """The error type of NVIDIA's binding."""


def test_an_nvml_that_fails_is_a_reason_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = mock.Mock(NVMLError=NVMLError)
    nvml.nvmlSystemGetDriverVersion.side_effect = nvml.nvmlDeviceGetHandleByUUID.side_effect = NVMLError("GPU is lost")
    monkeypatch.setattr(gpus, "start_nvml", lambda: nvml)
    assert gpus.visible_gpus().why_none.endswith("(NVML does not answer: GPU is lost)")
    with pytest.raises(gpus.NoNvml, match="GPU is lost"):
        gpus.topology([gpus.Gpu("GPU-1", "H200", 140.0)])
    assert gpus.gpu_memory_used_mib(["GPU-1"]) == {}
