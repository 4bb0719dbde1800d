#!/bin/bash
# What SLURM runs for x-1. Made by headway; it may be submitted again by hand.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=a100:4
#SBATCH --cpus-per-task=6
#SBATCH --mem=64G
#SBATCH --time=2:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --constraint=nvlink
#SBATCH --licenses=fluent:1
#SBATCH --mail-type=END
#SBATCH --contiguous
#SBATCH --open-mode=append
#SBATCH --signal=USR2@300
#SBATCH --requeue

module load cuda
source env.sh

run='/data/my runs/x-1'
# If this is submitted by hand, SLURM writes elsewhere: the output then goes where that of the other starts is.
log="$run"/log/job.txt
if ! [ /proc/self/fd/1 -ef "$log" ] && { : >> "$log"; } 2> /dev/null; then
  echo "the output goes to $log"
  exec >> "$log" 2>&1
fi
# One agent per node starts the ranks there. `--wait=0`: a node that ends early does not limit the others.
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=24 --kill-on-bad-exit=1 --wait=0 \
  /opt/venv/bin/python -P -m headway agent --run "$run" &
# srun's exit status does not say how the run ended; what the agents have left in the run directory does.
# This last command waits for srun, ends it if it outlives the agents, and has the job's exit status.
exec /opt/venv/bin/python -P -m headway.launcher.epilogue "$run" --step $!
