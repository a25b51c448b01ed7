"""NVIDIA's management library and the GPUs it knows."""

from __future__ import annotations

from typing import Any

from autotune.power.meter import MeterUnavailable


def load_nvml() -> Any:
    """NVIDIA's binding, initialised. Raises MeterUnavailable."""
    try:
        import pynvml
    except ImportError as error:
        raise MeterUnavailable("nvml: the package nvidia-ml-py is missing: pip install nvidia-ml-py") from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise MeterUnavailable("nvml: an old package named pynvml hides NVIDIA's: pip uninstall pynvml && "
                               "pip install --force-reinstall nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MeterUnavailable(f"nvml: no NVIDIA driver answers: {error}") from error
    return pynvml
