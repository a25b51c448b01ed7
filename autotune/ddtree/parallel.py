"""A rank's device and process group, and what of NCCL this host can do."""

import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the CUDA driver interface


def pick_device(wanted: str, index: int) -> torch.device:
    """The rank's device, made current. Raises torch's RuntimeError or AssertionError when it is not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation could have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def set_nvls(wanted: bool, device: torch.device, size: int) -> None:
    """Decides before NCCL starts whether it may use NVLink multicast (NVLS); it stays off unless asked for.

    Raises RuntimeError when it is asked for and this host cannot have it or its environment forbids it.
    """
    if not wanted:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        return
    if device.type != "cuda":
        raise RuntimeError(f"NCCL error: NVLS (NVLink multicast) needs CUDA GPUs, but this rank runs on {device.type}")
    if size < 2:
        raise RuntimeError("NCCL error: NVLS (NVLink multicast) needs --tp-size of at least 2")
    if os.environ.get("NCCL_NVLS_ENABLE") == "0" or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        raise RuntimeError("NCCL error: NVLS (NVLink multicast) is forbidden by this host's environment")
    answer, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    failed = driver.cuDeviceGetAttribute(ctypes.byref(answer), MULTICAST_SUPPORTED, torch.cuda.current_device())
    if failed or not answer.value:
        raise RuntimeError(f"NCCL error: GPU {torch.cuda.current_device()} does not support NVLS (NVLink multicast)")
    os.environ["NCCL_NVLS_ENABLE"] = "1"


def join_ranks(rank: int, size: int, device: torch.device, port: int, listener: int) -> None:
    """Starts the process group over the store at 127.0.0.1:port; rank 0 serves it on the listening descriptor."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    served = listener if rank == 0 else None
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(minutes=2), master_listen_fd=served)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1, device=device))
