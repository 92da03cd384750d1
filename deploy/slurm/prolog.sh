#!/bin/bash
# Prolog=… in slurm.conf, as root on each node of a job: refuse nodes whose agent does not answer. For clusters
# where the agent runs as a service (deploy/systemd) on nodes that several Slurm jobs share (OverSubscribe).
# A failing prolog drains the node, with this message as the reason in slurmd's log.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin    # Slurm gives its prologs none
# Only jobs that asked for it: sbatch --constraint=coslice, alone or within an expression, as in 'h100&coslice'.
[[ ${SLURM_JOB_CONSTRAINTS:-} =~ (^|[^[:alnum:]_.-])coslice($|[^[:alnum:]_.-]) ]] || exit 0
if ! systemctl --quiet is-active coslice-agent; then
    echo "coslice: the agent of ${SLURMD_NODENAME:-this node} does not run: systemctl status coslice-agent" >&2
    exit 1
fi
