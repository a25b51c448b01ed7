#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          h200
#   Trial          14
#   Space          h200 (f82f9375c049)
#   Engine         sglang sglang 0.5.16
#   Model          target ./models/dense-8b, draft ./models/dense-8b-draft
#   Device         NVIDIA H200 00f98db6
#   Driver         580.159.04
#   autotune       0.1.0
#   Configuration  speculation=none attention_backend=triton sampling_backend=flashinfer cuda_graph=true chunked_prefill=2048 mem_fraction=0.85 load_format=dummy grammar_backend=none concurrency=128
#   Measured       19.13 tok/J, 12,271 tok/s, 641.3 W, TTFT p99 366.0 ms, TPOT p99 11.95 ms at concurrency=128
#   Energy         nvml (gpu)
#   Verdict        not confirmed (+94.5 % over the baseline)
#   Reproduce      python -m autotune tune +space=h200 'workload.contexts=[60]' workload.warmup_s=3 workload.settle_s=4 workload.window_s=8 workload.window_max_s=14 study.launches=9 study.confirm.finalists=0 study.confirm.max_rounds=3
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/opt/torch/.venv/bin/python3}  # interpreter that has the engine
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
  --sampling-backend flashinfer \
  --chunked-prefill-size 2048 \
  --mem-fraction-static 0.85 \
  --load-format dummy \
  --grammar-backend none
