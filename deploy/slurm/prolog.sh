#!/bin/bash
# Prolog=… in slurm.conf, as root on each node of a job: refuse nodes whose agent does not answer. For clusters
# where the agent runs as a service (deploy/systemd) on nodes that several Slurm jobs share (OverSubscribe).
# A failing prolog drains the node, with this message as the reason in slurmd's log.
set -euo pipefail
case ",${SLURM_JOB_CONSTRAINTS:-}," in
    *,coslice,*) ;;        # only jobs that asked for it: sbatch --constraint=coslice
    *) exit 0 ;;
esac
if ! systemctl --quiet is-active coslice-agent; then
    echo "coslice: the agent of ${SLURMD_NODENAME:-this node} does not run: systemctl status coslice-agent" >&2
    exit 1
fi
