#!/usr/bin/env bash
# Pretrain the 70b Llama; sized for eight nodes of 8. See launch_llama.sh for the variables; more flags may follow.
set -euo pipefail
export NNODES=${NNODES:-8} WORKERS=${WORKERS:-8} TP=${TP:-8} PP=${PP:-4} MBS=${MBS:-1} GBS=${GBS:-1024}
export TRAIN_ITERS=${TRAIN_ITERS:-100000} MOCK_VOCAB=${MOCK_VOCAB:-32000}
exec "$(dirname "${BASH_SOURCE[0]}")/launch_llama.sh" 70b "$@"
