"""Expected decode speed of a model on GPUs: the larger of the memory's and the arithmetic units' time for one step.

Source of the formula: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009. The
constants are fitted to published measurements: `python -m tests.benchmarks.roofline`.
"""

from __future__ import annotations

from typing import NamedTuple

from autotune.engine.model import ModelShape


class GpuLimits(NamedTuple):
    """Peaks of one GPU: memory bandwidth in GB/s, dense arithmetic in TFLOP/s with 16 and with 8 bits."""

    gb_per_s: float
    tflops_16: float
    tflops_8: float


# By a part of the GPU's name; data sheets, without sparsity.
GPUS = {"B300": GpuLimits(8000, 2250, 4500), "B200": GpuLimits(8000, 2250, 4500), "H200": GpuLimits(4800, 989, 1979),
        "H100": GpuLimits(3350, 989, 1979), "H20": GpuLimits(4000, 148, 296), "A100": GpuLimits(2039, 312, 624),
        "L40S": GpuLimits(864, 362, 733), "L4": GpuLimits(300, 121, 242), "MI355": GpuLimits(8000, 2500, 5000),
        "MI325": GpuLimits(6000, 1307, 2614), "MI300": GpuLimits(5300, 1307, 2614)}


class Constants(NamedTuple):
    """Reached shares of bandwidth and arithmetic, fixed milliseconds of a step, microseconds of one all-reduce."""

    bandwidth: float
    arithmetic: float
    step_ms: float
    all_reduce_us: float


FITTED = Constants(0.4, 0.2, 2.0, 50.0)  # to 509 published rates of vLLM: the mean error is a factor of 1.5
LIMIT = Constants(1.0, 1.0, 0.0, 0.0)  # nothing is faster


def limits_of(gpu_name: str) -> GpuLimits | None:
    """The peaks of a GPU by its name; None for an unknown one."""
    return next((limits for part, limits in GPUS.items() if part.lower() in gpu_name.lower()), None)


def step_s(shape: ModelShape, gpu: GpuLimits, gpus: int, batch: float, context: float, kv_bytes: float = 2.0,
           constants: Constants = FITTED) -> float:
    """Seconds of one decode step of `batch` requests with `context` tokens each, on one server of `gpus` GPUs.

    Weights are read once a step; of the experts those that at least one token of the batch chose, at equal chances.
    `kv_bytes`: bytes of one number of the KV cache.
    """
    chosen = 1 - (1 - shape.experts_of_a_token / shape.experts) ** batch if shape.experts else 0.0
    used = shape.dense_weights + chosen * shape.weights_of_experts
    read = used * shape.weight_bytes + batch * context * shape.kv_values() * kv_bytes
    active = shape.dense_weights + (shape.weights_of_experts * shape.experts_of_a_token / shape.experts
                                    if shape.experts else 0)
    peak = gpu.tflops_8 if shape.weight_bytes <= 1 else gpu.tflops_16
    memory_s = read / (gpus * gpu.gb_per_s * 1e9 * constants.bandwidth)
    arithmetic_s = 2 * batch * active / (gpus * peak * 1e12 * constants.arithmetic)
    reduce_s = 2 * shape.layers * constants.all_reduce_us * 1e-6 if gpus > 1 else 0.0
    return max(memory_s, arithmetic_s) + constants.step_ms * 1e-3 + reduce_s


def tokens_per_s(shape: ModelShape, gpu: GpuLimits, gpus: int, batch: float, context: float, kv_bytes: float = 2.0,
                 constants: Constants = FITTED) -> float:
    """Output tokens per second of all requests together; see `step_s`."""
    return batch / step_s(shape, gpu, gpus, batch, context, kv_bytes, constants)
