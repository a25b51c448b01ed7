#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          b300_replay
#   Trial          12
#   Space          b300_replay (4c9d3f9469fe)
#   Engine         sglang_ddtree sglang 0.5.23+replay
#   Model          target replay/kimi-class-590gb, draft replay/dflash-draft
#   Device         NVIDIA B300 (replay) a0a2b130, NVIDIA B300 (replay) 416d393e, NVIDIA B300 (replay) 6a747152, NVIDIA B300 (replay) 9ebd0568, NVIDIA B300 (replay) c5cb7889, NVIDIA B300 (replay) 2d23e62b, NVIDIA B300 (replay) 303a5a6f, NVIDIA B300 (replay) a94a4adc
#   Driver         replay
#   autotune       0.1.0
#   Configuration  parallel=tp8 nvls=true allreduce_fusion=true attention_backend=triton tree_budget=8 tree_topk=4 mem_fraction=0.9 graph_max_bs=256 trust_remote_code=true concurrency=128
#   Measured       1.488 tok/J, 4,830 tok/s, 3,245 W, TTFT p99 29.18 ms, TPOT p99 32.29 ms at concurrency=128
#   Energy         nvml (gpu)
#   Verdict        Trial 12 gives 20.7 % more output tokens per joule than the baseline. Re-launched in interleaved blocks (A B B A), two-way layout on log values; 6 blocks. Gain +20.7 %, 95 % interval +15.8 % to +25.8 %. Under the same load (concurrency=128) the server alone gives +7.7 %.
#   Reproduce      python -m autotune tune +space=b300_replay
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/opt/sglang/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/path/to/autotune}  # folder to start in, as in the study
MODEL_TARGET=${MODEL_TARGET:-replay/kimi-class-590gb}  # the target model
MODEL_DRAFT=${MODEL_DRAFT:-replay/dflash-draft}  # the draft model

export NCCL_NVLS_ENABLE=1
export SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0

cd -- "$WORKDIR"
exec "${PYTHON}" -m sglang.launch_server \
  --model-path "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --device cuda \
  --enable-metrics \
  --max-running-requests 256 \
  --speculative-algorithm DDTREE \
  --speculative-draft-model-path "${MODEL_DRAFT}" \
  --tp-size 8 \
  --enable-nccl-nvls \
  --flashinfer-allreduce-fusion-backend auto \
  --attention-backend triton \
  --speculative-ddtree-budget 8 \
  --speculative-ddtree-topk 4 \
  --mem-fraction-static 0.9 \
  --cuda-graph-max-bs-decode 256 \
  --trust-remote-code
