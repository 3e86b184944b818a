#!/usr/bin/env bash
# Start pretraining of a Llama on this node: launch_llama.sh MODEL [more flags of pretrain_gpt]
# launch_llama_*.sh set the defaults for one model. The same line starts every node of a job but for NODE_RANK.
#
#   WORKERS        workers on this node, one per accelerator
#   TP, PP         tensor and pipeline parallelism; the rest of all workers is data parallelism
#   MBS, GBS       samples in a micro-batch and in a global batch
#   TRAIN_ITERS    steps
#   DATA           .args file that prepare_data.py wrote (default: mock data of MOCK_VOCAB tokens)
#   CHECKPOINTS    folder, the same on all nodes, to save to every SAVE_INTERVAL steps (default 500) and to go on from
#   ELASTIC        yes or no; no trains with stock Megatron (default yes)
#   DRY_RUN        yes or no; yes prints grid, memory and environment of the job, and starts nothing (default no)
#   NNODES         nodes of the job                  (default of the model); more than one need the next three
#   NODE_RANK      this node, from 0                 (default SLURM_NODEID, where srun has set it)
#   RDZV_ENDPOINT  host:port of the first node
#   TOKEN_FILE     file with the job's secret, the same line on all nodes; or set ELAS_TOKEN to the secret
#   EXIT_CODE_FILE file into which the first node writes the job's exit code
#   ELASRUN_FLAGS  more flags of elasrun, split at spaces
#   PYTHON         interpreter                       (default .venv of this checkout if it is there, else python3)
set -euo pipefail

die() {
    echo "megatron_elas: $*" >&2
    exit 2
}

# Whether the variable of this name says yes; the second argument is its default.
is_yes() {
    case ${!1:-$2} in
        [Yy][Ee][Ss] | [Tt][Rr][Uu][Ee] | 1) return 0 ;;
        [Nn][Oo] | [Ff][Aa][Ll][Ss][Ee] | 0) return 1 ;;
        *) die "$1 is '${!1}': set it to yes or no" ;;
    esac
}

model=${1:-}
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$repo/configs/llama/$model.args" ] ||
    die "there is no model '$model': give one of $(cd "$repo/configs/llama" && echo *.args | sed 's/\.args//g')"
shift

read -ra flags <<<"${ELASRUN_FLAGS:-}"
if is_yes DRY_RUN no; then # of the whole job, so what tells its nodes apart may be left out
    flags+=(--dry-run)
    NODE_RANK=${NODE_RANK:-0} RDZV_ENDPOINT=${RDZV_ENDPOINT:-node0}
    [ -n "${TOKEN_FILE:-}" ] || export ELAS_TOKEN=${ELAS_TOKEN:-of-a-dry-run}
fi
nodes=(--nnodes "${NNODES:-1}")
node_rank=${NODE_RANK:-}
if [ "${NNODES:-1}" != 1 ]; then
    [ -n "${RDZV_ENDPOINT:-}" ] || die "NNODES is $NNODES: set RDZV_ENDPOINT to host:port of the first node"
    nodes+=(--rdzv-endpoint "$RDZV_ENDPOINT")
    node_rank=${node_rank:-${SLURM_NODEID:-${SLURM_PROCID:-}}}
    [ -n "$node_rank" ] || die "NNODES is $NNODES: set NODE_RANK on every node, from 0"
    [ -n "${TOKEN_FILE:-}${ELAS_TOKEN:-}" ] ||
        die "NNODES is $NNODES: set TOKEN_FILE to a file with one random line, or ELAS_TOKEN, the same on all nodes"
fi
[ -z "$node_rank" ] || nodes+=(--node-rank "$node_rank")
[ -z "${TOKEN_FILE:-}" ] || nodes+=(--token-file "$TOKEN_FILE")
[ -z "${EXIT_CODE_FILE:-}" ] || nodes+=(--exit-code-file "$EXIT_CODE_FILE")

if [ -n "${DATA:-}" ]; then
    [ -f "$DATA" ] || die "data file '$DATA' does not exist: set DATA to the .args file that prepare_data.py wrote"
    data=("@$(realpath "$DATA")")
else
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "${MOCK_VOCAB:-32000}")
fi

elastic=()
if is_yes ELASTIC yes; then
    elastic=(--elastic)
fi

checkpoints=()
if [ -n "${CHECKPOINTS:-}" ]; then
    checkpoints=(--save "$CHECKPOINTS" --save-interval "${SAVE_INTERVAL:-500}")
    # The first run finds none and begins at the beginning.
    [ ! -f "$CHECKPOINTS/latest_checkpointed_iteration.txt" ] || checkpoints+=(--load "$CHECKPOINTS")
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ ! -x "$repo/.venv/bin/python" ] || python=$repo/.venv/bin/python
fi
command -v "$python" >/dev/null || die "there is no Python '$python': run 'make venv', or set PYTHON"

export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron asks for it up to Hopper
exec "$python" -m megatron_elas.cli.elasrun "${nodes[@]}" --nproc-per-node "${WORKERS:-8}" "${flags[@]}" \
    -m megatron_elas.pretrain_gpt "@$repo/configs/llama/$model.args" "${data[@]}" "${elastic[@]}" "${checkpoints[@]}" \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" \
    --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-256}" --train-iters "${TRAIN_ITERS:-1000}" "$@"
