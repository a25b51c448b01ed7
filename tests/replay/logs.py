"""What the stand-in prints: lines as SGLang's, made up in its style, and how its ranks die."""

from __future__ import annotations

import time
from collections.abc import Mapping

LIBRARY = "/opt/sglang/lib/python3.12/site-packages"
SHARDS = 62
"""Files of the checkpoint."""
GRAPH_ADVICE = """Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)
3. disable torch compile by not using --enable-torch-compile
4. disable CUDA graph by --disable-decode-cuda-graph. (Not recommended. Huge performance loss)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose
"""


def say(text: str, told_s: float, writer: str = "") -> None:
    """One line of the log: `told_s` seconds after the start of the process by the replay's clock."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + told_s))
    print(f"[{stamp}{' ' + writer if writer else ''}] {text}", flush=True)


BEGAN = time.time()


def _frames(*frames: tuple[str, int, str, str]) -> str:
    """(file below site-packages, line, function, code) as a traceback's frames, outermost first."""
    return "".join(f'  File "{LIBRARY}/{file}", line {line}, in {function}\n    {code}\n'
                   for file, line, function, code in frames)


SCHEDULER = "sglang/srt/managers/scheduler.py"
START = ((SCHEDULER, 6362, "run_scheduler_process", "scheduler = Scheduler(server_args, port_args)"),
         (SCHEDULER, 611, "__init__", "self.init_model_worker()"),
         ("sglang/srt/managers/tp_worker.py", 268, "__init__", "self._init_model_runner()"))
RUNNER = "sglang/srt/model_executor/cuda_graph_runner.py"
CAPTURE = (("sglang/srt/model_executor/model_runner.py", 2471, "init_device_graphs",
            "self.graph_runner = CudaGraphRunner(self)"),
           (RUNNER, 702, "capture_one_batch_size", "run_once()"))
MOE = "sglang/srt/layers/moe/fused_moe_triton/layer.py"
MLA = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mla.py"
DEATHS: Mapping[str, tuple[str, str]] = {
    "cublas_capture": (
        _frames(*CAPTURE, ("sglang/srt/layers/communicator.py", 588, "prepare_mlp",
                           "hidden_states, residual = flashinfer_allreduce_residual_rmsnorm("),
                (MOE, 1791, "run_moe_core", "return self.quant_method.apply("),
                ("sglang/srt/layers/quantization/fp8.py", 1204, "apply", "return F.linear(x, layer.weight)")),
        "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLtMatmul with transpose_mat1 1 "
        "transpose_mat2 0 m 384 n 576 k 7168 mat1_ld 7168 mat2_ld 7168 result_ld 384 abcType 14 computeType 68`"),
    "cublas_mla_bmm": (
        _frames(*CAPTURE, ("sglang/srt/models/deepseek_v2.py", 1655, "forward", "return self.forward_core(s)"),
                (MLA, 211, "forward_absorb_prepare", "q_nope_out = torch.bmm(q_nope.transpose(0, 1), self.w_kc)")),
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmStridedBatchedEx(handle, "
        "opa, opb, m, n, k, &alpha, a, CUDA_R_16BF, lda, stridea, b, CUDA_R_16BF, ldb, strideb, &beta, c)`"),
    "nonetype_dtype": (
        _frames(*CAPTURE, ("sglang/srt/models/deepseek_v2.py", 742, "forward_deepep",
                           "final_hidden_states = self.experts(hidden_states, topk_output)"),
                (MOE, 1726, "forward_impl", "combine_input = self.run_moe_core("),
                (MOE, 1784, "run_moe_core", "if self.w13_weight_scale.dtype == torch.float8_e8m0fnu:")),
        "AttributeError: 'NoneType' object has no attribute 'dtype'"),
    "oom_weights": (
        _frames(*START, ("sglang/srt/model_loader/loader.py", 795, "load_model",
                         "model = _initialize_model(self.model_config, self.load_config)"),
                (MOE, 388, "__init__", "self.quant_method.create_weights("),
                ("sglang/srt/layers/quantization/fp8.py", 930, "create_weights", "w13_weight = torch.empty(")),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.50 GiB. GPU {gpu} has a total capacity of "
        "268.59 GiB of which 6.31 GiB is free. Including non-PyTorch memory, this process has 262.27 GiB memory in use."
        " Of the allocated memory 258.90 GiB is allocated by PyTorch."),
    "oom_kv_runtime": (
        _frames((SCHEDULER, 6368, "run_scheduler_process", "scheduler.run_event_loop()"),
                (SCHEDULER, 2044, "event_loop_overlap", "batch = self.get_next_batch_to_run()"),
                ("sglang/srt/mem_cache/common.py", 512, "alloc_for_decode", "raise RuntimeError(error_msg)")),
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 8448 tokens.\n"
        "Available tokens: 1184"),
}
"""Name of a crash: (frames, exception)."""


def death(name: str, gpu: int) -> str:
    """What a rank prints before it dies of `name`. Faults in graph capture come with the advice that SGLang adds."""
    frames, exception = DEATHS[name]
    text = f"Scheduler hit an exception: Traceback (most recent call last):\n{frames}{exception.format(gpu=gpu)}\n"
    if "cuda_graph_runner" not in frames:
        return text
    again = _frames(*START, (RUNNER, 418, "__init__", "raise Exception("))
    message = exception.split(": ", 1)[1]
    return (f"{text}\nDuring handling of the above exception, another exception occurred:\n\n"
            f"Traceback (most recent call last):\n{again}Exception: Capture cuda graph failed: {message}\n"
            f"{GRAPH_ADVICE}")
