#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          h200
#   Trial          3
#   Space          h200 (f82f9375c049)
#   Engine         sglang sglang 0.5.16
#   Model          target ./models/dense-8b, draft ./models/dense-8b-draft
#   Device         NVIDIA H200 c2a9c88d
#   Driver         580.159.04
#   autotune       0.1.0
#   Configuration  speculation=none attention_backend=triton sampling_backend=pytorch cuda_graph=true chunked_prefill=8192 mem_fraction=0.85 load_format=dummy grammar_backend=none concurrency=128
#   Measured       18.11 tok/J, 11,874 tok/s, 655.0 W, TTFT p99 438.4 ms, TPOT p99 12.45 ms at concurrency=128
#   Energy         nvml (gpu)
#   Verdict        Keep the baseline's server and run it at concurrency=128: 99.8 % more output tokens per joule than at concurrency=32. Re-launched in interleaved blocks (A B B A), paired differences of log values; 8 blocks. Gain +99.8 %, 94 % interval +85.7 % to +115 %. The server of trial 8 gives -8.6 % (94 % interval -18.2 % to +2.1 %) under that load and +63.2 % (94 % interval +52.0 % to +75.2 %) at concurrency=32.
#   Reproduce      python -m autotune tune +space=h200 'workload.contexts=[60]' workload.warmup_s=3 workload.settle_s=4 workload.window_s=8 workload.window_max_s=14 study.launches=12 study.confirm.launches=8 study.confirm.finalists=1
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/opt/torch/.venv/bin/python3}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in: relative paths count from it
MODEL_TARGET=${MODEL_TARGET:-./models/dense-8b}  # the target model

export NCCL_NVLS_ENABLE=0
export SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0

cd -- "$WORKDIR"
exec "${PYTHON}" -m sglang.launch_server \
  --model-path "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --device cuda \
  --enable-metrics \
  --cuda-graph-max-bs-decode 128 \
  --max-running-requests 128 \
  --attention-backend triton \
  --sampling-backend pytorch \
  --chunked-prefill-size 8192 \
  --mem-fraction-static 0.85 \
  --load-format dummy \
  --grammar-backend none
