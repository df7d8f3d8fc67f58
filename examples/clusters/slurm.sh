#!/bin/bash
# A package on two hosts of four GPUs:
#
#     sbatch examples/clusters/slurm.sh model_x8 --epochs 10
#
# with the package, and the folder of checkpoints, on a file system that both see. srun starts
# torchrun once on each host. A rank that fails is started again by torchrun, a job whose host fails
# by Slurm (--requeue); both go on from the newest checkpoint.
#SBATCH --job-name=model_x8
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

set -euo pipefail
package=${1:?the package}
shift

# The name of the interface that joins the hosts, where the first that Linux lists is not it.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    "$package/run.py" train \
    --checkpoint-dir "checkpoints_$SLURM_JOB_NAME" --checkpoint-every 100 --resume "$@"
