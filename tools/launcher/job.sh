# The job: how many nodes it has, which of them this one is, and where node 0 is, as SLURM or the user says; another
# scheduler's variables belong here. launch_multinode.sh and preflight.py source it, after tools/environment.sh.
# shellcheck shell=bash

# set_job: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as they are set or SLURM says.
# shellcheck disable=SC2154 # common.sh has set me
set_job() {
    NNODES=${NNODES:-${WORLD_SIZE:-}}
    [ "${WORLD_SIZE:-$NNODES}" = "$NNODES" ] ||
        die "NNODES is $NNODES but WORLD_SIZE is $WORLD_SIZE: here both mean the number of nodes, set one of them"
    if [ -z "$NNODES" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
        # A batch script has no SLURM_STEP_ID. That of salloc's shell is a number of its own; srun --pty gives a terminal.
        [ -n "${SLURM_STEP_ID:-}" ] && [ "$SLURM_STEP_ID" -lt 4294967290 ] && [ ! -t 0 ] ||
            die "in a SLURM job, but not started by srun: write 'srun --ntasks-per-node=1 $me ...', or set NNODES"
        [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
            die "srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes: give it --ntasks-per-node=1"
        NNODES=$SLURM_STEP_NUM_NODES
        NODE_RANK=$SLURM_NODEID
        MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)}
        MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 300 * 40))} # other jobs may run on these nodes
        GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
        RUN_NAME=${RUN_NAME:-job$SLURM_JOB_ID-step$SLURM_STEP_ID} # a requeued job finds its folder again
    fi
    [ "$NNODES" = 1 ] || [[ $NNODES && ${NODE_RANK:-} && ${MASTER_ADDR:-} ]] ||
        die "NNODES is '$NNODES', NODE_RANK '${NODE_RANK:-}', MASTER_ADDR '${MASTER_ADDR:-}': set the number of nodes, 0 on \
the node of MASTER_ADDR and 1 to NNODES - 1 on the others, and an address of node 0 that all can reach"
    set_number NNODES 1 1 1000000
    MASTER_ADDR=${MASTER_ADDR:-localhost}
    set_number NODE_RANK 0 0 "$((NNODES - 1))"
    set_number MASTER_PORT 29500 1 65535
}
