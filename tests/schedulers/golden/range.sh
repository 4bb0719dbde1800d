#!/bin/bash
# What SLURM runs for x-1. Made by headway; it may be submitted again by hand.
#SBATCH --nodes=1-2
#SBATCH --mincpus=2
#SBATCH --open-mode=append
#SBATCH --signal=USR2@120
#SBATCH --requeue

run='/data/my runs/x-1'
# If this is submitted by hand, SLURM writes elsewhere: the output then goes where that of the other starts is.
log="$run"/log/job.txt
if ! [ /proc/self/fd/1 -ef "$log" ] && { : >> "$log"; } 2> /dev/null; then
  echo "the output goes to $log"
  exec >> "$log" 2>&1
fi
# One agent per node starts the ranks there. `--wait=0`: a node that ends early does not limit the others.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --wait=0 \
  /opt/venv/bin/python -P -m headway agent --run "$run" &
# srun's exit status does not say how the run ended; what the agents have left in the run directory does.
# This last command waits for srun, ends it if it outlives the agents, and has the job's exit status.
exec /opt/venv/bin/python -P -m headway.launcher.epilogue "$run" --step $! \
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --wait=0 \
  /opt/venv/bin/python -P -m headway agent --run "$run"
