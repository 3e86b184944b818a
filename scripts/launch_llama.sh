#!/usr/bin/env bash
# Start pretraining of a Llama on this node: launch_llama.sh MODEL [more flags of pretrain_gpt]
# launch_llama_*.sh set the defaults for one model. The same line starts every node of a job but for NODE_RANK.
#
#   WORKERS        workers on this node, one per accelerator
#   TP, PP         tensor and pipeline parallelism; the rest of all workers is data parallelism
#   MBS, GBS       samples in a micro-batch and in a global batch
#   TRAIN_ITERS    steps
#   DATA           .args file that prepare_data.py wrote (default: mock data of MOCK_VOCAB tokens)
#   ELASTIC        yes or no; no trains with stock Megatron (default yes)
#   NNODES         nodes of the job                  (default 1); more than one need the next three
#   NODE_RANK      this node, from 0                 (default SLURM_NODEID, where srun has set it)
#   RDZV_ENDPOINT  host:port of the first node
#   TOKEN_FILE     file with the job's secret, the same line on all nodes; or set ELAS_TOKEN to the secret
#   PYTHON         interpreter                       (default .venv of this checkout if it is there, else python3)
set -euo pipefail

die() {
    echo "megatron_elas: $*" >&2
    exit 2
}

model=${1:-}
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$repo/configs/llama/$model.args" ] ||
    die "there is no model '$model': give one of $(cd "$repo/configs/llama" && echo *.args | sed 's/\.args//g')"
shift

nodes=(--nnodes "${NNODES:-1}")
node_rank=${NODE_RANK:-}
if [ "${NNODES:-1}" != 1 ]; then
    [ -n "${RDZV_ENDPOINT:-}" ] || die "NNODES is $NNODES: set RDZV_ENDPOINT to host:port of the first node"
    nodes+=(--rdzv-endpoint "$RDZV_ENDPOINT")
    node_rank=${node_rank:-${SLURM_NODEID:-}}
    [ -n "$node_rank" ] || die "NNODES is $NNODES: set NODE_RANK on every node, from 0"
    [ -n "${TOKEN_FILE:-}${ELAS_TOKEN:-}" ] ||
        die "NNODES is $NNODES: set TOKEN_FILE to a file with one random line, or ELAS_TOKEN, the same on all nodes"
fi
[ -z "$node_rank" ] || nodes+=(--node-rank "$node_rank")
[ -z "${TOKEN_FILE:-}" ] || nodes+=(--token-file "$TOKEN_FILE")

if [ -n "${DATA:-}" ]; then
    [ -f "$DATA" ] || die "data file '$DATA' does not exist: set DATA to the .args file that prepare_data.py wrote"
    data=("@$(realpath "$DATA")")
else
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "${MOCK_VOCAB:-32000}")
fi

case ${ELASTIC:-yes} in
    [Yy][Ee][Ss] | [Tt][Rr][Uu][Ee] | 1) elastic=(--elastic) ;;
    [Nn][Oo] | [Ff][Aa][Ll][Ss][Ee] | 0) elastic=() ;;
    *) die "ELASTIC is '$ELASTIC': set it to yes or no" ;;
esac

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ ! -x "$repo/.venv/bin/python" ] || python=$repo/.venv/bin/python
fi
command -v "$python" >/dev/null || die "there is no Python '$python': run 'make venv', or set PYTHON"

export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron asks for it up to Hopper
exec "$python" -m megatron_elas.cli.elasrun "${nodes[@]}" --nproc-per-node "${WORKERS:-8}" \
    -m megatron_elas.pretrain_gpt "@$repo/configs/llama/$model.args" "${data[@]}" "${elastic[@]}" \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" \
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-256}" --train-iters "${TRAIN_ITERS:-1000}" "$@"
