#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          local
#   Trial          0
#   Space          local (62a97be825a9)
#   Engine         ddtree autotune 1.2.3
#   Model          target /models/Target-7B, draft org/draft
#   Device         GPU-12ab
#   Driver         580
#   autotune       0.1
#   Configuration  tree_budget=0 tp=1 dp=1 allreduce_fusion=false nvls=false max_running_requests=8 concurrency=4
#   Measured       2.000 tok/J, 80.00 tok/s, 40.00 W, TTFT p99 200.0 ms, TPOT p99 20.00 ms at concurrency=4
#   Energy         cpu_time (server processes), ASSUMED from a configured constant, not measured
#   Verdict        not confirmed
#   Reproduce      python -m autotune tune +space=local
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/opt/engine/bin/python}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/srv/tuning}  # folder to start in: relative paths count from it
MODEL_TARGET=${MODEL_TARGET:-/models/Target-7B}  # the target model
MODEL_DRAFT=${MODEL_DRAFT:-org/draft}  # the draft model
: "${HF_TOKEN:?set HF_TOKEN: a secret of the measured command, never written here}"
: "${API_KEY:?set API_KEY: a secret of the measured command, never written here}"

export CACHE="${MODEL_TARGET}"'/cache %h'
export HF_TOKEN

cd -- "$WORKDIR"
exec "${PYTHON}" -m autotune.ddtree \
  --host "${HOST}" \
  --port "${PORT}" \
  --model "${MODEL_TARGET}" \
  --note '100% $HOME $(id) ${X} \n' \
  --api-key "${API_KEY}" \
  --draft "${MODEL_DRAFT}" \
  --tree-budget 0 \
  --tp-size 1 \
  --dp-size 1 \
  --max-running-requests 8
