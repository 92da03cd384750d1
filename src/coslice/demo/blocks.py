"""Runs blocks: some jobs, from the same beginning, to their end, alone or together; and hears every step.

A shared block has a real ``coslice up`` in a process of its own and jobs with the environment that
``coslice run`` gives them. A solo block has the jobs' processes and their verifiers and no coslice: the
variable that names the accelerator's cores is all they get.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from coslice.demo.accounting import Section, Series, Window, keep_on, process_cpu
from coslice.demo.processes import Child, Children
from coslice.errors import OperationFailed
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

GROUP = "accelerator"
SILENCE = 120.0
WARM_UP = 2
"""Steps of a block that are not measured: building and warming up, and then jobs that all began at once have
to fall into step with each other."""
"""A block in which no process says anything for so long (seconds) has failed."""
HostCpu = Callable[[], float]


@dataclass(frozen=True)
class Machine:
    """Which cores play which part."""

    accelerator: int
    others: frozenset[int]

    @property
    def all(self) -> frozenset[int]:
        return self.others | {self.accelerator}


@dataclass(frozen=True)
class JobPlan:
    name: str
    task: str
    seed: int
    questions: int
    steps: int
    verifier_port: int = 0

    def command(self) -> list[str]:
        options = {
            "--task": self.task,
            "--seed": self.seed,
            "--questions": self.questions,
            "--steps": self.steps,
            "--verifier-port": self.verifier_port,
        }
        flags = [part for name, value in options.items() for part in (name, str(value))]
        return [sys.executable, "-m", "coslice.demo.job", *flags]


@dataclass
class StepRecord:
    begin: float
    end: float
    section: Section
    phases: list[tuple[str, float, float]]
    reward: float
    core_busy: float
    off_section_cpu: float
    """Of the job's process, since it began."""
    services_cpu: float
    """Of the demo and its services (verifiers, orchestrator, agent), since they began."""


@dataclass
class JobRun:
    """One run of one job, as it told it."""

    plan: JobPlan
    steps: list[StepRecord] = field(default_factory=list)
    digest: str = ""
    state_bytes: int = 0
    section_cpu: float = 0.0

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    @property
    def sections(self) -> list[Section]:
        return [step.section for step in self.steps]

    @property
    def step_seconds(self) -> list[float]:
        return [step.end - step.begin for step in self.steps[WARM_UP:]]


@dataclass
class Block:
    """What a block measured. ``journal`` and the device figures are a shared block's."""

    runs: dict[str, JobRun]
    journal: Path | None = None
    peak_device_bytes: int = 0
    device_budget_bytes: int = 0

    @property
    def window(self) -> Window:
        """From when every job has its first steps behind it to when the first of them ends."""
        return Window(
            max(run.steps[WARM_UP - 1].end for run in self.runs.values()),
            min(run.steps[-1].end for run in self.runs.values()),
        )

    @property
    def wall(self) -> float:
        """Seconds from the first job's first step to the last job's last."""
        runs = self.runs.values()
        return max(run.steps[-1].end for run in runs) - min(run.steps[0].begin for run in runs)

    @property
    def core_busy_s(self) -> float:
        """Seconds the accelerator's core was busy within the window, by the kernel's account of the core."""
        return self.window.growth(self._series(lambda step: step.core_busy))

    @property
    def section_cpu_s(self) -> float:
        """The same by the kernel's account of the threads inside accelerator sections."""
        return self.window.section_cpu([section for run in self.runs.values() for section in run.sections])

    @property
    def useful_duty(self) -> float:
        return min(self.core_busy_s, self.section_cpu_s) / self.window.wall

    @property
    def host_cpu(self) -> float:
        """Cores' worth of work off the accelerator: jobs outside sections, verifiers, coslice, the demo."""
        jobs = sum(
            self.window.growth([(step.end, step.off_section_cpu) for step in run.steps])
            for run in self.runs.values()
        )
        services = self.window.growth(self._series(lambda step: step.services_cpu))
        return (jobs + services) / self.window.wall

    def _series(self, counter: Callable[[StepRecord], float]) -> Series:
        return sorted((step.end, counter(step)) for run in self.runs.values() for step in run.steps)


class Listener:
    """Hears of progress; each method does nothing unless overridden."""

    def stage(self, title: str) -> None:
        """Something other than a block begins."""

    def block(self, title: str, plans: Sequence[JobPlan], *, shared: bool) -> None:
        """A block begins."""

    def section(self, job: str) -> None:
        """The job is on the accelerator now."""

    def off(self, job: str) -> None:
        """The job left the accelerator; its answers are with the verifier."""

    def step(self, job: str, record: StepRecord) -> None:
        """The job finished a step."""

    def ended(self, job: str) -> None:
        """The job is done."""


def solo(
    children: Children, machine: Machine, plan: JobPlan, services: Sequence[Child], listener: Listener
) -> Block:
    """One job with the whole accelerator and no coslice."""
    return _run(children, machine, [plan], {}, services, listener)


def shared(
    children: Children,
    machine: Machine,
    plans: Sequence[JobPlan],
    services: Sequence[Child],
    listener: Listener,
    *,
    need: int,
    budget: int,
    folder: Path,
) -> Block:
    """All jobs at once, taking turns through a ``coslice up`` of their own. Its files stay in ``folder``."""
    up = children.start(
        "coslice-up",
        [sys.executable, "-m", "coslice.cli.main", "up", "--json", "--state", str(folder),
         "--device", "host", "--group", f"{GROUP}:cpus={machine.accelerator}:memory={budget}B",
         "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"],
        _environment(machine), anywhere=True,
    )  # fmt: skip
    try:
        addresses = children.first_line(up, timeout=SILENCE)
        keep_on(up.pid, machine.others)  # it had to see the accelerator's core to accept it
        variables = {
            "COSLICE_ORCHESTRATOR": addresses["orchestrator"],
            "COSLICE_AGENT": addresses["agent"],
            "COSLICE_GROUP": GROUP,
            "COSLICE_NEED": str(need),
        }
        block = _run(children, machine, plans, variables, [*services, up], listener)
        device = _device(addresses["agent"])
    finally:
        up.stop()
    block.journal = Path(addresses["journal"])
    block.peak_device_bytes, block.device_budget_bytes = device.peak_bytes, device.budget_bytes
    return block


def _device(agent: str) -> pb.DeviceStatus:
    with grpc.insecure_channel(agent) as channel:
        status = pb_grpc.AgentStub(channel).GetNodeStatus(pb.GetNodeStatusRequest(), timeout=SILENCE)
    return next(device for device in status.devices if device.group == GROUP)


def _environment(machine: Machine) -> dict[str, str]:
    """Ours without any coslice setting, and the same for every process of the demo, alone or sharing."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}
    return environment | {
        "COSLICE_ACCELERATOR_CPUS": str(machine.accelerator),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Tensors get pages of their own and give them back when freed: what a job takes is what it uses.
        "MALLOC_MMAP_THRESHOLD_": str(192 << 10),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
    }


def start_job(children: Children, machine: Machine, plan: JobPlan, variables: dict[str, str]) -> Child:
    identity = {"COSLICE_JOB": plan.name, "COSLICE_INCARNATION": uuid.uuid4().hex} if variables else {}
    environment = _environment(machine) | variables | identity
    # Importing the framework may use every core; the job then keeps off the accelerator by itself.
    return children.start(plan.name, plan.command(), environment, anywhere=True)


def start_verifier(children: Children, machine: Machine, name: str, rate: float) -> tuple[Child, int]:
    """A verifier service of ``rate`` answers per second; the process and its port."""
    command = [sys.executable, "-m", "coslice.demo.verifier", "--rate", repr(rate)]
    child = children.start(name, command, _environment(machine))
    return child, int(children.first_line(child, timeout=SILENCE)["port"])


def _run(
    children: Children,
    machine: Machine,
    plans: Sequence[JobPlan],
    variables: dict[str, str],
    services: Sequence[Child],
    listener: Listener,
) -> Block:
    jobs = {plan.name: start_job(children, machine, plan, variables) for plan in plans}
    runs = {plan.name: JobRun(plan) for plan in plans}
    going = set(jobs)
    for line in children.lines(timeout=SILENCE):
        if line.child in going:
            if line.facts is not None:
                _hear(runs[line.child], line.facts, services, listener)
            else:
                going.discard(line.child)
                listener.ended(line.child)
                if not runs[line.child].digest:
                    raise jobs[line.child].failure(services)
        elif line.facts is None and (dead := [child for child in services if child.name == line.child]):
            raise dead[0].failure()
        if not going:
            break
    for child in jobs.values():
        child.stop()
    block = Block(runs)
    if block.window.wall <= 0:
        raise OperationFailed("the jobs ran one after the other, not together: give them more --steps")
    return block


def _hear(run: JobRun, facts: dict[str, Any], services: Sequence[Child], listener: Listener) -> None:
    match facts["event"]:
        case "section":
            listener.section(run.plan.name)
        case "off":
            listener.off(run.plan.name)
        case "step":
            section = Section(*facts["section"])
            run.section_cpu += section.cpu
            record = StepRecord(
                begin=facts["begin"],
                end=facts["end"],
                section=section,
                phases=[(name, begin, end) for name, begin, end in facts["phases"]],
                reward=facts["reward"],
                core_busy=facts["core_busy"],
                off_section_cpu=facts["process_cpu"] - run.section_cpu,
                services_cpu=time.process_time() + sum(process_cpu(child.pid) for child in services),
            )
            run.steps.append(record)
            listener.step(run.plan.name, record)
        case "done":
            run.digest, run.state_bytes = facts["digest"], facts["state_bytes"]
        case _:
            pass
