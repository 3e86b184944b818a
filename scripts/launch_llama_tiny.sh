#!/usr/bin/env bash
# Pretrain the tiny Llama; sized for any machine, no accelerator needed. See launch_llama.sh for the variables; more flags may follow.
set -euo pipefail
export WORKERS=${WORKERS:-4} TP=${TP:-1} PP=${PP:-2} MBS=${MBS:-1} GBS=${GBS:-8}
export TRAIN_ITERS=${TRAIN_ITERS:-50} MOCK_VOCAB=${MOCK_VOCAB:-512}
exec "$(dirname "${BASH_SOURCE[0]}")/launch_llama.sh" tiny "$@"
