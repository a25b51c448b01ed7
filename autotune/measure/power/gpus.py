"""NVIDIA's management library and the GPUs it knows."""

from __future__ import annotations

from typing import Any

from autotune.measure.power.meter import MeterUnavailable


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


def gpu_uuids(visible: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that `visible` (as in CUDA_VISIBLE_DEVICES) names; None: all, in PCI order.

    Numbers count in PCI order, so launch with CUDA_DEVICE_ORDER=PCI_BUS_ID, or with UUIDs. Raises
    MeterUnavailable for a GPU that is not there.
    """
    nvml = load_nvml()
    try:
        every = [str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)))
                 for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise MeterUnavailable(f"nvml: cannot list the GPUs: {error}") from error
    if visible is None:
        return tuple(every)
    found = []
    for name in (part.strip() for part in visible.split(",") if part.strip()):
        matches = [u for i, u in enumerate(every) if name == str(i) or (name.startswith("GPU-") and u.startswith(name))]
        if name.startswith("MIG-"):
            matches = [name]
        if len(matches) != 1:
            raise MeterUnavailable(f"nvml: no GPU {name} here (there are {len(every)}; nvidia-smi -L lists them)")
        found.append(matches[0])
    return tuple(found)
