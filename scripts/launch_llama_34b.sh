#!/usr/bin/env bash
# Pretrain the 34b Llama; sized for four nodes of 8. See launch_llama.sh for the variables; more flags may follow.
set -euo pipefail
export NNODES=${NNODES:-4} WORKERS=${WORKERS:-8} TP=${TP:-8} PP=${PP:-2} MBS=${MBS:-1} GBS=${GBS:-1024}
export TRAIN_ITERS=${TRAIN_ITERS:-100000} MOCK_VOCAB=${MOCK_VOCAB:-32000}
exec "$(dirname "${BASH_SOURCE[0]}")/launch_llama.sh" 34b "$@"
