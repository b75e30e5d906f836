#!/bin/bash
# A run on several machines under SLURM. Submit it from the project's folder, with the Python environment active:
#
#     sbatch --partition=NAME recipes/slurm.sh +recipe=gpt2_small
#
# Arguments after this file's name go to main.py. sbatch's own options, before it, win over the lines below.
# docs/cluster.md explains what is needed and what can go wrong.

#SBATCH --job-name=gpt
#SBATCH --nodes=2
# One torchrun on each node; it starts a rank for each GPU.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
# Main memory of each node: some GB for each rank, and on the first one 24 bytes for each parameter while it saves.
#SBATCH --mem=64G
#SBATCH --time=24:00:00
# After the failure of a node, SLURM starts the job again by itself.
#SBATCH --requeue
# Ten minutes before the time is over: the run saves and ends, and the job queues up again.
#SBATCH --signal=USR1@600
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

set -uo pipefail
trap : TERM USR1 # this shell must outlive what it starts

if [ ! -f main.py ]; then
    echo "error: there is no main.py in $PWD; submit this file from the project's folder" >&2
    exit 1
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
launcher=(
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="${RANKS_PER_NODE:-gpu}"
    # The agents of all nodes meet on the first one, at a port that no other job there is likely to use.
    --rdzv_backend=c10d --rdzv_endpoint="${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))" --rdzv_id="$SLURM_JOB_ID"
    # A rank that dies costs the steps since the last snapshot, but not the job.
    --max-restarts=3
    # A signal that torchrun doesn't handle kills it, and its ranks end without saving: SIGUSR1 is not in its default.
    --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    # Seconds that the ranks have for their last step and snapshot before torchrun kills them; 30 by default.
    --shutdown-timeout=300
)
# Agents of different nodes count their restarts differently: a new store each time keeps the attempts apart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun ends with 1 after a stop as after an error. A shell around it, which gets the same signals, can tell: 143.
# shellcheck disable=SC2016
task='trap "stopped=yes" TERM USR1
"$@"
code=$?
if [ -n "${stopped:-}" ] && [ "$code" != 0 ]; then code=143; fi
exit "$code"'

# --wait: once the first node has ended, the others have five minutes, the one of rank 0 to save. Without it, torchrun
# would wait much longer.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=300 \
    bash -c "$task" task "${launcher[@]}" main.py "$@"
code=$?

# Finished (0) or failed (another code): that's the end. Stopped: again, unless scancel has stopped it for good.
if [ "$code" = 143 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
