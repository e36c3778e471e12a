#!/usr/bin/env bash
# Trains on several nodes: starts torchrun on this one, which waits for the others. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS=2 ./launch_multinode.sh --coco_image_path DIR ...
# Under SLURM, one srun starts all nodes, and these four values come from the job:
#   srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=16 --gpus-per-node=2 ./launch_multinode.sh ...
# Arguments go to demo_coco_resnet18.py. Without paths it trains 40 steps on a small sample set, which each node makes.
# To train over each of several networks, and to compare them: tools/series.py
# Other environment variables and their defaults. Only GPUS and the names of interfaces may differ between nodes:
#   WORLD_SIZE           another name for NNODES: the number of nodes, not of processes
#   MASTER_PORT=29500    the training's port on node 0; the probe has the next one, each restart the one after
#   GPUS                 processes on this node: one per GPU, or 1 if there is no GPU; `all` fails without a GPU.
#                        GPUS_PER_NODE is another name for it
#   IFNAME               keeps the traffic on eth0, on the adapter mlx5_0, or on all `adapters` that are up;
#                        mlx5_0,ib0: NCCL starts over ib0. Without it NCCL takes adapters that are up, else, as
#                        Gloo, the interface that leads to MASTER_ADDR
#   PROBE=1              1: measure the link before multi-process training; 0: skip that
#   RESTARTS=0           how many times to restart from the last checkpoint after a failure
#   CONNECT_TIMEOUT=300  seconds to wait for the other nodes; after a start that failed at least --timeout + 180
#   LOG_DIR=logs         (in the current folder) this node's log is LOG_DIR/RUN_NAME/nodeK.log
#   RUN_NAME             the same on all nodes; default: on each node its date, time and a number, in SLURM the job's
#   OMP_NUM_THREADS      threads per process: cores / processes
# Exit code: 0: finished; 2: an error that you can fix; 75: stopped by a signal after saving;
# 128 + N: stopped by signal N, not saved; else failed.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

if [[ " $* " =~ \ (-h|--help)\  ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    echo "The script's own options: python demo_coco_resnet18.py --help"
    exit
fi

# The Python of the active environment, or of .venv, which is made on first use; `here`: for this machine.
python=$("$root/tools/environment.sh" here)
# Prints NNODES=2, NODE_RANK=0 and so on, one a line, as set above or as SLURM says. eval sets them.
job=$("$python" "$root/tools/run.py" --job) || exit
eval "$job"

# For the sample set ({sample}): so small that, even on a slow CPU, a step spends less time computing than sending at 1 Gb/s.
sample="--coco_image_path {sample}/train2017 --annotation_path {sample}/annotations/instances_train2017.json"
sample+=" --weights none --batch_size 4 --image_size 64 --num_epochs 100 --max_steps 40"

# run.py keeps the log, chooses the network, passes stop signals on and restarts. In the options of torchrun {start} is
# 0 for the training, 1 for the probe before it, 2 and more for restarts; {port} is MASTER_PORT + {start}; {wait} is
# how many seconds the nodes wait for each other.
id="${RUN_NAME:-demo}-{start}" # torchrun makes a folder of this name: without a slash
exec "$python" "$root/tools/run.py" --restarts="${RESTARTS:-0}" --log_dir="${LOG_DIR:-logs}" --run_name="$RUN_NAME" \
    --ifname="${IFNAME:-}" --probe="${PROBE:-1}" \
    --port="$MASTER_PORT" --wait="${CONNECT_TIMEOUT:-300}" --sample="$sample" -- \
    torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
    --rdzv_backend=static --rdzv_endpoint="$MASTER_ADDR:{port}" --rdzv_id="${id//\//-}" --rdzv_conf="timeout={wait}" \
    "$root/demo_coco_resnet18.py" "$@"
