#!/usr/bin/env bash
# Written by autotune: starts one measured configuration of a study.
#
#   Study          local_h200
#   Trial          21
#   Space          local (496ef5905621)
#   Engine         ddtree 0.1.0
#   Device         NVIDIA H200 554386ed
#   Driver         580.159.04
#   autotune       0.1.0
#   Configuration  tree_budget=16 tree_topk=2 draft_depth=5 tp=1 dp=1 allreduce_fusion=false nvls=false max_running_requests=16 concurrency=16
#   Measured       29.48 tok/J, 3,799 tok/s, 128.6 W, TTFT p99 25.80 ms, TPOT p99 7.454 ms at concurrency=16
#   Energy         nvml (gpu)
#   Verdict        Trial 14 gives 361 % more output tokens per joule than the baseline. Re-launched in interleaved blocks (A B B A), two-way layout on log values; 6 blocks. Gain +361 %, 95 % interval +148 % to +755 %. Under the same load (concurrency=16) the server alone gives +144 %.
#   Reproduce      python -m autotune tune +space=local device=cuda outputs=/tmp/out study.name=local_h200 study.launches=12 study.confirm.finalists=1 workload.window_s=4 workload.window_max_s=8
#
# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand
set -euo pipefail

HOST=${HOST:-127.0.0.1}  # address to listen on (0.0.0.0: every interface)
PORT=${PORT:-8000}  # port to listen on
PYTHON=${PYTHON:-/opt/torch/.venv/bin/python3}  # interpreter that has the engine
WORKDIR=${WORKDIR:-/path/to/autotune}  # folder to start in, as in the study

cd -- "$WORKDIR"
exec "${PYTHON}" -m autotune.engines.ddtree \
  --host "${HOST}" \
  --port "${PORT}" \
  --device cuda \
  --threads 1 \
  --tree-budget 16 \
  --tree-topk 2 \
  --draft-depth 5 \
  --tp-size 1 \
  --dp-size 1 \
  --max-running-requests 16
