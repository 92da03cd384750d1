"""Checks of the machine: devices and their driver, bindings, privileges, memory, limits, environment.

Where the reasons come from: NVIDIA's documentation and bug reports of cuda-checkpoint, NCCL, PyTorch and
torch_memory_saver; docs/backends.md names them.
"""

from collections.abc import Iterator

from coslice.agent.backends import cuda_checks
from coslice.agent.backends.base import MoveError
from coslice.cli.doctor_facts import Finding, Level, Machine
from coslice.sizes import format_size

GIB = 1 << 30
BAD_BINDINGS = ("13.0.0", "13.3.0")
"""Lack the arguments of a restore."""
SYS_PTRACE = 1 << 19
"""Bit 19 of a capability mask (capabilities(7))."""
SHM_ENOUGH, MEMLOCK_ENOUGH, FILES_ENOUGH = GIB, 64 << 20, 4096


def system(machine: Machine) -> Iterator[Finding]:
    if machine.system != "Linux":
        yield Finding(
            check="system",
            level=Level.PROBLEM,
            text=f"this is {machine.system}: state is moved by means that only Linux has",
            fix="run coslice on Linux",
        )
        return
    yield Finding(check="system", level=Level.OK, text=f"Linux on {machine.arch}")


def driver(machine: Machine) -> Iterator[Finding]:
    survey = machine.survey
    present = machine.exists("/proc/driver/nvidia/version") or machine.exists("/dev/nvidiactl")
    if survey.error and not present:
        yield Finding(check="driver", level=Level.NOTE, text="no NVIDIA driver: jobs share CPU cores here")
        return
    if survey.error:
        yield Finding(
            check="driver",
            level=Level.PROBLEM,
            text=f"there is an NVIDIA driver, and NVML does not tell: {survey.error}",
            fix="pip install 'coslice[cuda]', and in a container give it the driver's utility capability "
            "(NVIDIA_DRIVER_CAPABILITIES=compute,utility); after a `systemctl daemon-reload` restart it",
        )
        return
    try:
        cuda_checks.check_driver(survey, program="cuda-bindings" not in machine.packages)
    except MoveError as error:
        yield Finding(check="driver", level=Level.PROBLEM, text=str(error), fix="as it says")
    else:
        names = ", ".join(sorted({gpu.name for gpu in survey.gpus})) or "no devices"
        text = f"{survey.driver}, {len(survey.gpus)} × {names}"
        yield Finding(check="driver", level=Level.OK, text=text)
    for text in cuda_checks.advice(survey):
        yield Finding(check="driver", level=Level.WARNING, text=text, fix="as it says")


def devices(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.survey.gpus:
        if gpu.mps_clients:
            yield Finding(
                check="mps",
                level=Level.PROBLEM,
                text=f"device {gpu.index} serves MPS clients (pids {', '.join(map(str, gpu.mps_clients))}): "
                "they cannot be checkpointed",
                fix="echo quit | nvidia-cuda-mps-control, or use app_channel for these jobs",
            )
        if gpu.ecc_uncorrected:
            yield Finding(
                check="ecc",
                level=Level.PROBLEM,
                text=f"device {gpu.index} had {gpu.ecc_uncorrected} uncorrected memory errors",
                fix="drain the node and reset the device",
            )


def bindings(machine: Machine) -> Iterator[Finding]:
    version = machine.packages.get("cuda-bindings", "")
    if not machine.survey.gpus:
        return
    if not version and "cuda-checkpoint" not in machine.programs:
        yield Finding(
            check="bindings",
            level=Level.WARNING,
            text="neither cuda-bindings nor cuda-checkpoint is here: the backend cuda cannot work",
            fix="pip install 'coslice[cuda]'",
        )
    elif version in BAD_BINDINGS or (version and _number(version) < (12, 8)):
        yield Finding(
            check="bindings",
            level=Level.PROBLEM,
            text=f"cuda-bindings {version} lacks what a restore needs",
            fix="pip install -U 'cuda-bindings>=13.4'",
        )
    else:
        yield Finding(check="bindings", level=Level.OK, text=version or "the cuda-checkpoint program")
    if machine.arch in ("aarch64", "arm64"):
        yield Finding(
            check="arch",
            level=Level.WARNING,
            text="on arm64 a driver was seen to lock a process and then refuse to checkpoint it",
            fix="try `coslice snapshot` with one job first; else use app_channel or app_endpoint",
        )


def privileges(machine: Machine) -> Iterator[Finding]:
    if not machine.survey.gpus:
        return
    status = dict(
        line.split(":\t", 1) for line in machine.read("/proc/self/status").splitlines() if ":\t" in line
    )
    able = machine.uid == 0 or int(status.get("CapEff", "0").strip() or "0", 16) & SYS_PTRACE
    if not able:
        yield Finding(
            check="privileges",
            level=Level.WARNING,
            text="neither root nor CAP_SYS_PTRACE: the driver does not checkpoint other processes (304)",
            fix="run the agent as root, or `setcap cap_sys_ptrace+ep` its python; app_channel needs neither",
        )
    if len(status.get("NSpid", "").split()) > 1:
        yield Finding(
            check="privileges",
            level=Level.WARNING,
            text="this is a pid namespace of its own: processes of other containers cannot be named",
            fix="run the agent with hostPID: true (docker: --pid=host)",
        )
    if "hidepid=" in machine.read("/proc/self/mounts") and machine.uid != 0:
        yield Finding(
            check="privileges",
            level=Level.WARNING,
            text="/proc is mounted with hidepid: other processes cannot be seen",
            fix="sudo mount -o remount,hidepid=0 /proc",
        )
    if able:
        yield Finding(check="privileges", level=Level.OK, text="may look into other processes")


def memory(machine: Machine) -> Iterator[Finding]:
    room = machine.available_memory()
    needed = sum(int(gpu.total * 1.1) for gpu in machine.survey.gpus)
    if needed > room:
        yield Finding(
            check="host memory",
            level=Level.WARNING,
            text=f"{format_size(room)} are available; what {len(machine.survey.gpus)} devices hold may need "
            f"{format_size(needed)}",
            fix="share with jobs that use less of the device, or add memory; coslice refuses a swap that "
            "would not fit before it touches a job",
        )
    else:
        yield Finding(check="host memory", level=Level.OK, text=f"{format_size(room)} available")
    if machine.read("/proc/sys/vm/overcommit_memory").strip() == "2":
        yield Finding(
            check="host memory",
            level=Level.WARNING,
            text="the kernel does not overcommit: large buffers may be refused while memory is free",
            fix="sudo sysctl vm.overcommit_memory=0",
        )


def limits(machine: Machine) -> Iterator[Finding]:
    gpus = bool(machine.survey.gpus)
    if machine.shm < SHM_ENOUGH:
        yield Finding(
            check="/dev/shm",
            level=Level.WARNING,
            text=f"/dev/shm has {format_size(machine.shm)}: NCCL, data loaders and Ray need more",
            fix="docker run --shm-size=16g; Kubernetes: an emptyDir of medium Memory at /dev/shm",
        )
    if gpus and 0 <= machine.memlock < MEMLOCK_ENOUGH:
        yield Finding(
            check="memlock",
            level=Level.WARNING,
            text=f"only {format_size(machine.memlock)} may be locked in memory: RDMA and pinned buffers fail",
            fix="ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )
    if 0 <= machine.files < FILES_ENOUGH:
        yield Finding(
            check="open files",
            level=Level.WARNING,
            text=f"a process may open {machine.files} files: servers with many jobs need more",
            fix="ulimit -n 65536",
        )


def environment(machine: Machine) -> Iterator[Finding]:
    """Of this shell: jobs that are started from it inherit it."""
    env = machine.env
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            yield Finding(
                check="allocator",
                level=Level.WARNING,
                text=f"{name} has expandable_segments:True: torch_memory_saver and SGLang cannot free such "
                "memory",
                fix=f"unset {name} for engines",
            )
    if not machine.survey.gpus:
        return
    if len(machine.survey.gpus) > 1 and env.get("NCCL_NVLS_ENABLE") != "0":
        yield Finding(
            check="nccl",
            level=Level.WARNING,
            text="NCCL may use NVLink SHARP: a checkpoint of a process with live multicast objects hangs",
            fix="export NCCL_NVLS_ENABLE=0 for jobs with --backend cuda",
        )
    if env.get("CUDA_INJECTION64_PATH") or env.get("NVTX_INJECTION64_PATH"):
        yield Finding(
            check="profilers",
            level=Level.WARNING,
            text="a profiler is injected into CUDA programs: they cannot be checkpointed",
            fix="unset CUDA_INJECTION64_PATH NVTX_INJECTION64_PATH",
        )
    if "jax" in machine.packages and env.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform":
        yield Finding(
            check="jax",
            level=Level.NOTE,
            text="JAX keeps freed GPU memory for itself unless told not to",
            fix="for JAX jobs: export XLA_PYTHON_CLIENT_ALLOCATOR=platform "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false",
        )


def tpu(machine: Machine) -> Iterator[Finding]:
    if not (machine.exists("/dev/accel0") or machine.exists("/dev/vfio/0")):
        return
    yield Finding(check="tpu", level=Level.OK, text="there are TPU devices")
    if machine.exists("/tmp/libtpu_lockfile"):
        yield Finding(
            check="tpu",
            level=Level.WARNING,
            text="/tmp/libtpu_lockfile is there: after a crash it keeps the next process from the TPU",
            fix="if no process uses the TPU: rm /tmp/libtpu_lockfile",
        )


NODE_CHECKS = (
    system,
    driver,
    devices,
    bindings,
    privileges,
    memory,
    limits,
    environment,
    tpu,
)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
