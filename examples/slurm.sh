#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120     # to this script, 120 s before the time limit: enough for one save
#SBATCH --requeue               # also after a node failure or preemption by another job
#SBATCH --open-mode=append      # one log file for all the turns

# Trains in turns: each turn ends with the time limit, and the next one resumes at the same step.
#     RUN=/shared/runs/a sbatch examples/slurm.sh
# With LOCAL=/scratch/a it also saves often on the own disk of each node, for a job that is killed.

preempted=85                    # exit code of preemptible.py when there is more to do
coordinator="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):12345"
export coordinator preempted LOCAL RUN SLURM_NTASKS

# In the background, since bash runs a trap only after the current command has ended.
srun --kill-on-bad-exit=0 bash -c 'exec python examples/preemptible.py --run "$RUN" \
    --requeue-code "$preempted" --coordinator "$coordinator" \
    --processes "$SLURM_NTASKS" --index "$SLURM_PROCID" ${LOCAL:+--local "$LOCAL"} "$@"' \
    train "$@" &
training=$!

stopped=0
trap 'stopped=1 told=1; kill -USR1 "$training"' USR1     # srun passes it on to every process
told=1
while [ "$told" -eq 1 ]; do     # a signal ends `wait`, but not the training
    told=0
    wait "$training"
    code=$?
done

# Requeue only after a USR1, not after scancel: a cancelled job must not start again.
if [ "$stopped" -eq 1 ] && [ "$code" -eq "$preempted" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
