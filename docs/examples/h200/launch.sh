#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          h200
#   Trial          3
#   Space          h200 (f82f9375c049)
#   Engine         sglang sglang 0.5.16
#   Model          target ./models/dense-8b, draft ./models/dense-8b-draft
#   Device         NVIDIA H200 ab5084bb
#   Driver         580.159.04
#   autotune       0.1.0
#   Configuration  speculation=none attention_backend=triton sampling_backend=pytorch cuda_graph=true chunked_prefill=8192 mem_fraction=0.85 load_format=dummy grammar_backend=none concurrency=128
#   Measured       18.94 tok/J, 9,262 tok/s, 489.0 W, TTFT p99 794.9 ms, TPOT p99 14.95 ms at concurrency=128
#   Energy         nvml (gpu)
#   Verdict        not confirmed (+84.7 % over the baseline)
#   Reproduce      python -m autotune tune +space=h200 outputs=/tmp/out 'workload.contexts=[60]' workload.warmup_s=3 workload.settle_s=4 workload.window_s=8 workload.window_max_s=14 study.confirm.finalists=0 study.launches=12
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-python3}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in, as in the study
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
