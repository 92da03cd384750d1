"""Measures one job's accelerator section before the demo begins, and sets the verifiers' rate by it.

The demo shows jobs that are off the accelerator a bit more than half of their time. How long a section
takes depends on the machine, so the verifiers' rate is set once, here, for all jobs and all blocks alike;
the report says so. The same warm-up shows how much memory a job takes while it computes.
"""

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coslice.agent.host import AnonymousMemory, Gone
from coslice.demo.blocks import SILENCE, JobPlan, Machine, start_job
from coslice.demo.processes import Child, Children

DUTY = 0.44
"""The share of a step that a job alone spends on the accelerator."""
SECTIONS = 6
ROUND_TRIP = 0.006
"""Seconds per step off the accelerator beside the verifier's: JSON, HTTP, the report."""
SAMPLE_EVERY = 0.004


@dataclass(frozen=True)
class Calibration:
    section_s: float
    """What a section is expected to take with ``questions``."""
    questions: int
    rate: float
    """Answers per second of each verifier."""
    state_bytes: int
    """What a job keeps on the accelerator between sections: weights, gradients, moments."""
    need_bytes: int
    """The most a job takes while it computes."""
    left_bytes: int
    """What a parked job is allowed to leave behind."""

    @property
    def step_s(self) -> float:
        return self.section_s / DUTY


def calibrate(children: Children, machine: Machine, plan: JobPlan, *, section_s: float) -> Calibration:
    """Run some sections of ``plan`` alone and size the steps so that a section takes about ``section_s``."""
    child = start_job(children, machine, replace(plan, steps=SECTIONS, verifier_port=0), {})
    sections: list[float] = []
    baseline = state = 0
    with _peak(child) as peak:
        for line in children.lines(timeout=SILENCE):
            if line.child != child.name:
                continue
            if line.facts is None:
                break
            match line.facts["event"]:
                case "registered":
                    baseline = line.facts["anonymous"] - line.facts["state_bytes"]
                case "step":
                    # Processor time: what else the machine does just now is not the job's pace.
                    sections.append(line.facts["section"][2])
                case "done":
                    state = line.facts["state_bytes"]
                case _:
                    pass
    if not state:
        raise child.failure()
    child.stop()
    measured = statistics.median(sections[2:])
    questions = plan.questions
    if not 0.85 < measured / section_s < 1.15:
        questions = max(4, min(96, round(questions * section_s / measured)))
    expected = measured * questions / plan.questions
    answers = questions * 16
    return Calibration(
        section_s=expected,
        questions=questions,
        rate=answers / (expected * (1 - DUTY) / DUTY - ROUND_TRIP),
        state_bytes=state,
        need_bytes=peak[0] - baseline,
        left_bytes=state // 10,
    )


@contextmanager
def _peak(child: Child) -> Iterator[list[int]]:
    """The highest anonymous memory of a process, sampled: the kernel reports no such maximum."""
    highest, stop = [0], threading.Event()

    def watch() -> None:
        memory = AnonymousMemory(child.pid)
        try:
            while not stop.wait(SAMPLE_EVERY):
                highest[0] = max(highest[0], memory.fast())
        except Gone:
            pass
        finally:
            memory.close()

    thread = threading.Thread(target=watch, name="peak", daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        stop.set()
        thread.join()
