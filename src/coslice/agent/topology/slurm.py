"""Slurm as the topology: what the step that this agent runs in says of its node, group and orchestrator.

Reads the variables that slurmd sets for each task (https://slurm.schedmd.com/srun.html, output environment
variables). What the command line says goes first.
"""

from collections.abc import Mapping

from msgspec import Struct

from coslice.agent.topology.hostlist import expand
from coslice.errors import ConfigError

PORT = 50051


class Step(Struct, frozen=True, kw_only=True):
    node: str
    nodes: tuple[str, ...]
    group: str
    """``COSLICE_GROUP``, or one for this allocation: ``slurm-JOBID``."""
    orchestrator: str
    """``COSLICE_ORCHESTRATOR``, or the allocation's first node."""
    gpus: int
    """Of this node, given to this step; -1: Slurm does not say."""


def step_of(env: Mapping[str, str]) -> Step:
    """Raises ``ConfigError`` outside of a step, and where the step cannot see the GPUs it was given."""
    job, node = env.get("SLURM_JOB_ID", ""), env.get("SLURMD_NODENAME", "")
    if not job or not node:
        raise ConfigError(
            "--topology slurm: this is no step of a Slurm job (no SLURM_JOB_ID, no SLURMD_NODENAME). "
            "Start it on each node with: srun --ntasks-per-node=1 coslice agent --topology slurm"
        )
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or node
    try:
        nodes = expand(listed)
    except ValueError as error:
        raise ConfigError(f"SLURM_JOB_NODELIST: {error}") from None
    if node not in nodes:
        raise ConfigError(f"node {node} is not one of this job's nodes ({listed}): start the agent with srun")
    return Step(
        node=node,
        nodes=nodes,
        group=env.get("COSLICE_GROUP") or f"slurm-{job}",
        orchestrator=env.get("COSLICE_ORCHESTRATOR") or f"{nodes[0]}:{PORT}",
        gpus=_gpus(env),
    )


def _gpus(env: Mapping[str, str]) -> int:
    given = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or ""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    named = len([gpu for gpu in given.split(",") if gpu])
    if named and visible is not None and not visible.strip():
        raise ConfigError(
            f"Slurm gave this step the GPUs {given}, and CUDA_VISIBLE_DEVICES hides them: unset it, or ask "
            "for them in the step (srun --gpus-per-node=…, and --overlap beside other steps)"
        )
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip()])
    return named if given else -1
