#!/bin/bash
# Epilog=… in slurm.conf, as root on each node: what a job left behind must not keep devices that others wait
# for. slurmd has ended its processes by now, also those that were frozen: SIGKILL reaches them. The agent sees
# each process end by itself; this only removes what an agent of the allocation (coslice.sbatch) kept on the node.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin    # Slurm gives its epilogs none
[[ ${SLURM_JOB_ID:?} =~ ^[0-9]+$ ]]
rm -rf -- "/tmp/coslice-${SLURM_JOB_USER:?}-$SLURM_JOB_ID"
