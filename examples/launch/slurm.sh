#!/bin/bash
# One run of jaxtune over the hosts of a SLURM job:
#   sbatch examples/launch/slurm.sh RECIPE output=/shared/RUN [key=value ...]
# The output and the model's folder must be ones that all hosts share.
#SBATCH --job-name=jaxtune
#SBATCH --nodes=2
# One process a host takes all of its GPUs. As many as GPUs (and fewer CPUs for each) is one a GPU.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
# Two minutes before the time is up the run saves and ends with 75; then the same command goes on in the queue.
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# When one process ends badly the others end by themselves, and say why: srun need not kill them.
srun --kill-on-bad-exit=0 jaxtune train "$@"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
