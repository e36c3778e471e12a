# Sourced by launch_multinode.sh under srun: number of nodes, this node's rank, node 0's address and port, from the job.
# $1: ports that the series of starts needs.
# shellcheck shell=bash disable=SC2034  # the launcher uses them
# NOTE: a batch script has SLURM_PROCID too, but only srun's tasks have SLURM_STEP_ID.
[ -n "${SLURM_PROCID:-}" ] && [ -n "${SLURM_STEP_ID:-}" ] ||
    die "in SLURM job $SLURM_JOB_ID but not started by srun: write 'srun --ntasks-per-node=1 $ME ...', or set NNODES"
NNODES=${SLURM_STEP_NUM_NODES:-$SLURM_NNODES}
tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-$NNODES}}
[ "$tasks" = "$NNODES" ] || [ "$SLURM_PROCID" = 0 ] || exit 1
[ "$tasks" = "$NNODES" ] ||
    die "srun started $tasks tasks on $NNODES nodes, but one on each starts all its processes: --ntasks-per-node=1"
NODE_RANK=${NODE_RANK:-$SLURM_NODEID}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
# The same name where the job is put back into the queue, and another one for each of its steps.
if [ -z "${RUN_NAME:-}" ]; then
    RUN_NAME=${NETWORK:+$NETWORK-}job$SLURM_JOB_ID
    [ "$SLURM_STEP_ID" = 0 ] || RUN_NAME+=-step$SLURM_STEP_ID
fi
# Ports for each start of a job, below the range from which Linux takes ports for outgoing connections.
ports=$(($1 < 10 ? 10 : $1))
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % (12000 / ports) * ports))}
if [ -z "${MASTER_ADDR:-}" ]; then
    # Of n[07-09,12]-ib,m3 the first node is n07-ib. Not by scontrol, which a container need not have.
    list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    MASTER_ADDR=$(sed -e 's/\[\([0-9]*\)[^]]*\]/\1/g' -e 's/,.*//' <<<"$list")
    # A node's name need not resolve; SLURM itself may know it by another address.
    if ! getent ahosts "$MASTER_ADDR" >/dev/null 2>&1; then
        address=$({ scontrol show node --oneliner "$MASTER_ADDR" 2>/dev/null || true; } |
            sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
        MASTER_ADDR=${address:-$MASTER_ADDR}
    fi
fi
