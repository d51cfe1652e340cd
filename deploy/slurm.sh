#!/usr/bin/env bash
# Trains with Headway on Slurm. srun starts --ntasks-per-node processes on each host: one per GPU if the hosts have
# GPUs. Run it in the folder of the recipe:
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 slurm.sh RECIPE [key=value ...]
# After a failure the job resumes from the last checkpoint. At the time limit, or if it is preempted, it saves its state
# and returns to the queue.
#   HEADWAY_RUN       run folder, on a file system that all hosts share; default: runs/NAME-JOB. If it holds a run, the
#                     job resumes that run.
#   HEADWAY_SIF       Apptainer image that contains headway; default: the headway on the PATH
#   HEADWAY_RESTARTS  number of restarts after failures; default: 3
# Tested: shellcheck; Slurm 22.05 with two nodes on one machine and four processes on CPUs: a whole run, a killed
# process, the time limit, and a requeued job.
# Not tested: several machines, GPUs, Apptainer, InfiniBand.
#SBATCH --job-name=headway
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

recipe=${1:?usage: sbatch slurm.sh RECIPE [key=value ...]}
name=$(basename "$recipe")
run=${HEADWAY_RUN:-runs/${name%.*}-$SLURM_JOB_ID}

inside=()
if [[ -n ${HEADWAY_SIF:-} ]]; then
  inside=(apptainer exec --nv "$HEADWAY_SIF")
fi
# Without OMP_NUM_THREADS each process would use all cores of its host. srun ignores the --cpus-per-task of sbatch.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
if [[ -e /dev/infiniband && $(ulimit -l) != unlimited ]]; then
  echo "slurm.sh: locked memory is limited (ulimit -l), and InfiniBand needs it unlimited: see docs/launch.md" >&2
fi

# If one process fails, srun waits before it kills the others: they may be writing a checkpoint.
start=(srun --kill-on-bad-exit=0 --wait=300 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${inside[@]}" headway train)
for ((left = ${HEADWAY_RESTARTS:-3}; ; left--)); do
  if [[ -e $run/recipe.yaml ]]; then
    what=(--resume "$run")
  else
    what=("$recipe" --run "$run" "${@:2}")
  fi
  # A stop writes summary.json. Remove an old one, so that its presence tells a stop from a failure.
  grep -qs '"finished": true' "$run/summary.json" || rm -f "$run/summary.json"
  status=0
  "${start[@]}" "${what[@]}" || status=$?
  if ((status == 0)); then
    exit 0
  elif [[ -e $run/summary.json ]]; then
    echo "slurm.sh: stopped, with the state saved; returning to the queue" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
  elif [[ ! -e $run/recipe.yaml ]] || ((left == 0)); then
    exit "$status"
  fi
  echo "slurm.sh: exit status $status; resuming from the last checkpoint" >&2
done
