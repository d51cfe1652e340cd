#!/usr/bin/env bash
# Headway on Slurm: srun starts one process a GPU, or so many a host without GPUs. From the folder of the recipe:
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 slurm.sh RECIPE [key=value ...]
# It goes on by itself: after a failure from the last checkpoint, at the time limit or after a preemption in the queue.
#   HEADWAY_RUN       the run folder, on a file system that all hosts see; default: runs/NAME-JOB. One that exists is
#                     gone on with.
#   HEADWAY_SIF       an Apptainer image in which headway is; default: the headway on the PATH
#   HEADWAY_RESTARTS  failures after which it gives up; default: 3
# Checked: shellcheck finds nothing; run by Slurm 22.05 with two nodes on one machine and four processes on CPUs, to the
# end, through a killed process, and through the time limit and the queue.
# Nobody has yet run it on several machines, with GPUs, with Apptainer or over InfiniBand.
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
# Without it every process would take all cores of its host. srun does not take sbatch's --cpus-per-task over.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
if [[ -e /dev/infiniband && $(ulimit -l) != unlimited ]]; then
  echo "slurm.sh: memory cannot be locked without limit (ulimit -l), which InfiniBand needs: see docs/launch.md" >&2
fi

# A process that ends with an error does not take the others along at once: they may be writing a checkpoint.
start=(srun --kill-on-bad-exit=0 --wait=300 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${inside[@]}" headway train)
for ((left = ${HEADWAY_RESTARTS:-3}; ; left--)); do
  if [[ -e $run/recipe.yaml ]]; then
    what=(--resume "$run")
  else
    what=("$recipe" --run "$run" "${@:2}")
  fi
  grep -qs '"finished": true' "$run/summary.json" || rm -f "$run/summary.json" # which a stop writes anew
  status=0
  "${start[@]}" "${what[@]}" || status=$?
  if ((status == 0)); then
    exit 0
  elif [[ -e $run/summary.json ]]; then
    echo "slurm.sh: stopped with its state saved; back to the queue" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
  elif [[ ! -e $run/recipe.yaml ]] || ((left == 0)); then
    exit "$status"
  fi
  echo "slurm.sh: status $status; going on from the last checkpoint" >&2
done
