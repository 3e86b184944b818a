#!/usr/bin/env bash
# Pretrain a Llama under Slurm, one elasrun per node:
#
#   sbatch --nodes 8 --gpus-per-node 8 scripts/launch_slurm.sh 70b [more flags of pretrain_gpt]
#
# Submit it in the checkout, or set REPO to the checkout, because Slurm runs a copy of this file. The variables of
# launch_llama.sh may be set, but for those that say which node this is. Beside them:
#
#   STATE_DIR   folder that all nodes see and only you may read, for the job's secret  (default ~/.megatron_elas)
#   PORT        of the controller on the first node                                    (default: from the job's number)
#
# The job goes on when a node fails, hence --no-kill, and ends with elasrun's exit code (docs/exit-codes.md). It may be
# requeued: set CHECKPOINTS, and it goes on from the newest one.
#SBATCH --job-name=llama
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=llama-%j.log
set -euo pipefail

die() {
    echo "megatron_elas: $*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is no Slurm job: start it with sbatch --nodes N scripts/launch_slurm.sh MODEL"
repo=${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}
[ -f "$repo/scripts/launch_llama.sh" ] ||
    die "there is no checkout in '$repo': submit in the checkout, or set REPO to it"
model=${1:-}
[ -f "$repo/scripts/launch_llama_$model.sh" ] || die "there is no model '$model': give one of 7b 13b 34b 70b tiny"
shift

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol cannot list the nodes '$SLURM_JOB_NODELIST'"
first_host=${hosts%%$'\n'*}
export NNODES=$SLURM_JOB_NUM_NODES
export RDZV_ENDPOINT=$first_host:${PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# A new secret for every run of the job. What a run that was cut off has left behind goes.
state=${STATE_DIR:-$HOME/.megatron_elas}
(umask 077 && mkdir -p "$state")
rm -rf "$state/slurm-$SLURM_JOB_ID".*
private=$(mktemp -d "$state/slurm-$SLURM_JOB_ID.XXXXXX") # mode 700
trap 'rm -rf "$private"' EXIT
export TOKEN_FILE=$private/token EXIT_CODE_FILE=$private/exit-code
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$TOKEN_FILE")

# elasrun decides what the loss of a task means, so srun must not end the others (--wait=0: however long they go on).
run=$((${SLURM_RESTART_COUNT:-0} + 1))
echo "megatron_elas: job $SLURM_JOB_ID, run $run: $model on $NNODES nodes, controller at $RDZV_ENDPOINT"
srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none \
    --no-kill --kill-on-bad-exit=0 --wait=0 "$repo/scripts/launch_llama_$model.sh" "$@" </dev/null &
step=$!

# A signal cuts the wait short: pass it on, and wait again. elasrun ends its workers, within its --grace-s of 10 (Slurm
# kills after KillWait, 30 unless changed), and gives 128 plus the signal's number.
waiting=yes
trap 'waiting=yes; kill -TERM "$step" 2>/dev/null || true' TERM INT HUP
while [ "$waiting" = yes ]; do
    waiting=no
    code=0
    wait "$step" || code=$?
done
# srun gives the highest code of all nodes, also of one that was lost and not needed; the job's is that of the first.
[ ! -s "$EXIT_CODE_FILE" ] || code=$(<"$EXIT_CODE_FILE")
exit "$code"
