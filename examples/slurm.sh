#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120     # to this script, 120 s before the time is up: enough for one save
#SBATCH --requeue               # also when a node fails, or a job of higher priority takes its place
#SBATCH --open-mode=append      # one log for all the turns

# Trains in turns: each ends with the time limit, and the next goes on from the same step.
#     RUN=/shared/runs/a sbatch examples/slurm.sh

preempted=85                    # how preemptible.py says that there is more to do
coordinator="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):12345"
export coordinator preempted RUN SLURM_NTASKS

# In the background, since bash runs a trap only when the command before it has ended.
srun --kill-on-bad-exit=0 bash -c 'exec python examples/preemptible.py --run "$RUN" \
    --requeue-code "$preempted" --coordinator "$coordinator" \
    --processes "$SLURM_NTASKS" --index "$SLURM_PROCID" "$@"' train "$@" &
training=$!

stopped=0
trap 'stopped=1 told=1; kill -USR1 "$training"' USR1     # srun hands it to every process
told=1
while [ "$told" -eq 1 ]; do     # a signal ends `wait`, not the training
    told=0
    wait "$training"
    code=$?
done

# Not what scancel has stopped: that would start again.
if [ "$stopped" -eq 1 ] && [ "$code" -eq "$preempted" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
