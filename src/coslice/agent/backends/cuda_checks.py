"""What must be true before a process is frozen by the CUDA driver. Each refusal names the remedy.

Looks at ``/proc``, cgroups and a survey; touches nothing, so whatever is refused here goes on as before. What
cannot be seen from outside (managed memory, CUDA IPC, arm64) the driver refuses, and ``cuda_calls.meaning``
explains it.
"""

from collections.abc import Mapping, Sequence

from coslice.agent.backends.base import MoveError
from coslice.agent.backends.cuda_calls import Pair, State
from coslice.agent.backends.process_ledger import Target
from coslice.agent.discovery import cgroups, procfs
from coslice.agent.discovery.survey import Survey
from coslice.sizes import format_size

API_NEEDED = 12080
"""The checkpoint calls are in the driver API since CUDA 12.8, which comes with driver 570."""
PROGRAM_NEEDED = (555,)
"""``cuda-checkpoint --action``."""
REMAP_NEEDED = 13000
PARTIAL_NEEDED = (575, 57, 8)
"""Before, a process that sees only some of the node's devices cannot be restored."""
IPC_NEEDED = (610,)
HOST_MARGIN = 1.1
"""The driver's copy in host memory takes a little more than what was on the device."""
REPORTED = {
    "570.158": "torch processes were refused as not supported: use 575.57.08 or later",
    "595.71.05": "ending a process that was restored was seen to hang the whole node. This agent checkpoints "
    "what it has to kill; do so before you kill one yourself (coslice snapshot)",
    "610.57.04": "locking a process with many threads was seen to crash it: try one job first",
}
"""What users of cuda-checkpoint reported of single drivers (its issues 34, 53, 58)."""
_PROFILERS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def check_driver(survey: Survey, *, program: bool) -> None:
    """Raises ``MoveError``. ``program``: calls are made by cuda-checkpoint."""
    if survey.error:
        raise MoveError(
            f"what is on the devices is not known ({survey.error}): nothing is moved without measuring; run "
            "the agent where NVML works (libnvidia-ml.so.1, and nvidia-ml-py of coslice[cuda])"
        )
    if program and survey.driver_version and survey.driver_version < PROGRAM_NEEDED:
        raise MoveError(
            f"driver {survey.driver} cannot checkpoint step by step: 555 or later is needed, 570 for torch"
        )
    if not program and survey.cuda < API_NEEDED:
        raise MoveError(
            f"driver {survey.driver} has no checkpoint calls: 570 (CUDA 12.8) or later is needed, upgrade it"
        )
    for gpu in survey.gpus:
        if program and gpu.persistence is False:
            raise MoveError(
                f"persistence mode of device {gpu.index} is off, and a restore by cuda-checkpoint then ends "
                "the process: turn it on (nvidia-smi -pm 1), or install cuda-bindings"
            )
        if gpu.mig:
            raise MoveError(
                f"device {gpu.index} is in MIG mode, which the driver cannot checkpoint (it would say that "
                "it is out of memory): turn MIG off (nvidia-smi -mig 0), or use another backend"
            )


def advice(survey: Survey) -> list[str]:
    """What works badly with this driver, each with its remedy. For logs and ``coslice doctor``."""
    found = []
    if survey.gpus and survey.driver_version < PARTIAL_NEEDED and len(survey.gpus) > 1:
        found.append(
            f"driver {survey.driver}: processes that see only some of the {len(survey.gpus)} devices may not "
            "come back; use 575.57.08 or later"
        )
    if any(gpu.persistence is False for gpu in survey.gpus):
        found.append(
            "persistence mode is off: every first use of a device takes seconds, and tools other than this "
            "agent's helpers cannot restore; turn it on (nvidia-smi -pm 1)"
        )
    for driver, text in REPORTED.items():
        if survey.driver == driver or survey.driver.startswith(f"{driver}."):
            found.append(f"driver {survey.driver}: {text}")
    return found


def check_remap(pairs: Sequence[Pair], survey: Survey) -> tuple[Pair, ...]:
    """The pairs, completed: the driver wants every device of the node named. Raises ``MoveError``."""
    if not pairs:
        return ()
    if survey.cuda < REMAP_NEEDED:
        raise MoveError(
            f"driver {survey.driver} cannot restore onto other devices: 580 (CUDA 13.0) or later is needed; "
            "upgrade it, or leave remap out"
        )
    for old, new in pairs:
        from_, to = survey.gpu(old), survey.gpu(new)
        if from_ is None or to is None:
            here = ", ".join(gpu.uuid for gpu in survey.gpus)
            raise MoveError(f"remap names {new if from_ else old}, which is not here; the devices are {here}")
        if to.name != from_.name or to.total < from_.total:
            raise MoveError(
                f"remap names {new} ({to.name}, {format_size(to.total)}) for {old} ({from_.name}, "
                f"{format_size(from_.total)}), and only a device of the same kind and size will do"
            )
    named = {old for old, _ in pairs}
    return (*pairs, *((gpu.uuid, gpu.uuid) for gpu in survey.gpus if gpu.uuid not in named))


def check_not_locked(targets: Sequence[Target], states: Mapping[int, State | None]) -> None:
    """By another than this agent. Raises ``MoveError``."""
    for target in targets:
        if states.get(target.pid) is State.LOCKED:
            raise MoveError(
                f"process {target.pid} is locked already, and not by this agent: let whoever did it end, or "
                f"unlock it (cuda-checkpoint --action unlock --pid {target.pid})",
                pid=target.pid,
            )


def check_processes(targets: Sequence[Target], survey: Survey) -> None:
    """Can the driver talk to them, and may they be frozen? Raises ``MoveError``."""
    for target in targets:
        _check_process(target, survey)
    for text, members in _by_cgroup(targets).items():
        if cgroups.frozen(text):
            raise MoveError(
                f"process {members[0].pid} is frozen by its cgroup, and a part of the driver inside it has "
                "to run: thaw it",
                pid=members[0].pid,
            )


def _check_process(target: Target, survey: Survey) -> None:
    pid = target.pid
    seen = procfs.process(pid)
    if seen is None or seen.started != target.started or seen.state in "ZX":
        raise MoveError(f"process {pid} has ended", pid=pid)
    if seen.group != pid:
        raise MoveError(f"{pid} is a thread of process {seen.group}: name the process", pid=pid)
    if seen.state in "Tt":
        raise MoveError(
            f"process {pid} is stopped (state {seen.state}), and a part of the driver inside it has to run: "
            f"let it go on (kill -CONT {pid}), or end its debugger",
            pid=pid,
        )
    if any(pid in gpu.mps_clients for gpu in survey.gpus):
        raise MoveError(
            f"process {pid} uses the Multi-Process Service (MPS), which the driver cannot checkpoint: start "
            "the job without it (unset CUDA_MPS_PIPE_DIRECTORY, or end nvidia-cuda-mps-control)",
            pid=pid,
        )
    if tool := next((name for name in _PROFILERS if procfs.has_set(pid, name)), None):
        raise MoveError(
            f"process {pid} runs under a profiler ({tool} is set), which the driver cannot checkpoint: start "
            "the job without it",
            pid=pid,
        )


def hidden(survey: Survey) -> str:
    """Why it is not known whose the devices are; empty if it is.

    From within a pid namespace NVML was seen to tell pids of the node, or none."""
    for gpu in survey.gpus:
        for holder in gpu.holders:
            if holder.bytes != 0 and procfs.process(holder.pid) is None:
                return (
                    f"device {gpu.index} is used by process {holder.pid}, which is not in this pid "
                    "namespace, and nothing of this job is seen there: run the agent in the node's (hostPID: "
                    "true; docker: --pid=host)"
                )
    return ""


def check_communicators(targets: Sequence[Target], survey: Survey) -> None:
    """Live NCCL communicators between processes. Raises ``MoveError``."""
    if len(targets) < 2:
        return
    for target in targets:
        if not procfs.has_mapped(target.pid, "/dev/shm/nccl-"):  # the segments of its shared-memory transport
            continue
        environment = procfs.environment(target.pid)
        lacking = []
        if environment.get("NCCL_NVLS_ENABLE") != "0":
            lacking.append("NCCL_NVLS_ENABLE=0")
        by_job_file = environment.get("CUDA_CHECKPOINT_JOB_FILE") and survey.driver_version >= IPC_NEEDED
        if environment.get("NCCL_P2P_DISABLE") != "1" and not by_job_file:
            lacking.append(
                "NCCL_P2P_DISABLE=1 (or driver 610 and a start under cuda-checkpoint --launch-job)"
            )
        if lacking:
            raise MoveError(
                f"process {target.pid} has live NCCL communicators with other processes, which the driver "
                "cannot checkpoint (it may hang for ever): take them down in "
                "coslice.workload.register(on_snapshot=...) and make them anew in on_restore, or start the "
                f"job with {' and '.join(lacking)}",
                pid=target.pid,
            )


def check_host_memory(targets: Sequence[Target], *, budget_left: int | None = None) -> None:
    """Room for copies of all device memory, on the node and in each cgroup. Raises ``MoveError``."""
    need = int(sum(target.bytes for target in targets) * HOST_MARGIN)
    if budget_left is not None and need > budget_left:
        raise MoveError(
            f"the copy of {format_size(need)} of device memory does not fit: "
            f"{format_size(max(0, budget_left))} of the agent's host budget are left; raise it "
            "(--host-memory), or share with fewer jobs",
            no_room=True,
        )
    if need > (available := procfs.available_memory()):
        raise MoveError(
            f"the copy of {format_size(need)} of device memory does not fit: the node has "
            f"{format_size(available)} of host memory available; free some, or share with fewer jobs",
            no_room=True,
        )
    for text, members in _by_cgroup(targets).items():
        inside = int(sum(target.bytes for target in members) * HOST_MARGIN)
        left = cgroups.memory_left(text)
        if left is not None and inside > left:
            raise MoveError(
                f"the copy of {format_size(inside)} of device memory is charged to the job's own cgroup, and "
                f"that has {format_size(left)} left: raise its memory limit (in Kubernetes, the container's)",
                no_room=True,
                pid=members[0].pid,
            )


def check_room(need: Mapping[str, int], survey: Survey, *, margin: int) -> str:
    """Why the devices do not have these bytes free; empty if they have."""
    for uuid, size in sorted(need.items()):
        gpu = survey.gpu(uuid)
        if gpu is None:
            return f"device {uuid} is not here any more"
        if gpu.free < size + (margin if size else 0):
            users = ", ".join(
                f"process {holder.pid} has {format_size(holder.bytes or 0)}" for holder in gpu.holders
            )
            return (
                f"device {gpu.index} has {format_size(gpu.free)} free and {format_size(size)} must come "
                f"back: {users or 'no process is listed there'}"
            )
    return ""


def _by_cgroup(targets: Sequence[Target]) -> dict[str, list[Target]]:
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(cgroups.groups_of(target.pid), []).append(target)
    return groups
