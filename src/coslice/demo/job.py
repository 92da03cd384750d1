"""One training job of the demo: ``python -m coslice.demo.job --task reverse --steps 14 …``.

A step is one stay on the accelerator (train on the scored batch, then sample the next one) and one wait off
it (the verifier scores what was sampled). The script does not know whether it shares the accelerator:
alone, without coslice's variables in the environment, every call of coslice is a no-op. It reports each
step as a line of JSON on standard output; times are monotonic seconds, which all processes of a machine
have in common.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import torch

import coslice
from coslice.agent.host import AnonymousMemory
from coslice.demo.accounting import cores_busy, keep_on
from coslice.demo.grpo import Batch, Settings, sample, update
from coslice.demo.model import Policy
from coslice.demo.task import TASKS, score

VERIFIER_TIMEOUT = 60.0
PAUSE = 0.9
"""Seconds between sections without a verifier: a core that never rests is faster than one that does."""


@dataclass(frozen=True)
class Verifier:
    """Where answers are scored: a service, or (``port`` 0, to calibrate) this process, after a pause."""

    task: str
    port: int

    def rewards(self, batch: Batch) -> list[float]:
        if not self.port:
            time.sleep(PAUSE)
            return [score(self.task, question, answer) for question, answer in batch.items()]
        connection = HTTPConnection("127.0.0.1", self.port, timeout=VERIFIER_TIMEOUT)
        try:
            body = json.dumps({"task": self.task, "items": batch.items()})
            connection.request("POST", "/score", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"the verifier on port {self.port} refused: {answer['error']}")
        rewards: list[float] = answer["rewards"]
        return rewards


@dataclass
class Record:
    """What the step under way has done so far."""

    begin: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    section: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.phases.append((name, begin, time.monotonic()))


class Job:
    def __init__(self, settings: Settings, verifier: Verifier, *, seed: int, steps: int) -> None:
        self._settings, self._verifier, self._seed, self._steps = settings, verifier, seed, steps
        self._orchestrator = coslice.connect()
        self._generator = torch.Generator().manual_seed(seed)
        self._cpus = accelerator_cpus()
        self._digest, self._state_bytes = "", 0

    def run(self) -> None:
        record = Record(time.monotonic())
        with self._section(record, 0, "init"):
            with record.phase("init"):
                self._build()
            with record.phase("generate"):
                batch = sample(self._policy, self._settings, self._generator)
        for step in range(self._steps):
            with record.phase("reward"):
                rewards = self._verifier.rewards(batch)
            record = self._finish(record, step, sum(rewards) / len(rewards))
            if step + 1 == self._steps:
                break
            with self._section(record, step + 1, "train"):
                with record.phase("train"):
                    update(self._policy, self._optimizer, batch, rewards, self._settings, self._generator)
                with record.phase("generate"):
                    batch = sample(self._policy, self._settings, self._generator)
                if step + 2 == self._steps:
                    self._digest = digest(self._policy)
                    self._state_bytes = state_bytes(self._policy, self._optimizer)
        say("done", digest=self._digest, state_bytes=self._state_bytes)
        self._orchestrator.close()

    def _build(self) -> None:
        """The policy, its optimizer and the promise to coslice that these two are the state to move."""
        self._policy = Policy(width=self._settings.width, layers=self._settings.layers)
        self._policy.reset(self._generator)
        self._optimizer = optimizer_of(self._policy, self._settings)
        coslice.workload.register(model=self._policy, optimizer=self._optimizer)
        memory = AnonymousMemory(os.getpid()).exact()
        say("registered", state_bytes=state_bytes(self._policy, self._optimizer), anonymous=memory)

    @contextmanager
    def _section(self, record: Record, step: int, phase: str) -> Iterator[None]:
        asked = time.monotonic()
        with self._orchestrator.on_accelerators(phase=phase):
            begin, cpu = time.monotonic(), time.thread_time()
            record.phases.append(("wait", asked, begin))
            say("section", step=step, phase=phase)
            yield
            record.section = (begin, time.monotonic(), time.thread_time() - cpu)
        say("off", step=step)

    def _finish(self, record: Record, step: int, reward: float) -> Record:
        self._orchestrator.note("reward", reward, step=step)
        end = time.monotonic()
        say(
            "step",
            step=step,
            begin=record.begin,
            end=end,
            phases=record.phases,
            section=record.section,
            reward=reward,
            core_busy=cores_busy(self._cpus),
            process_cpu=time.process_time(),
        )
        return Record(end)


def optimizer_of(policy: Policy, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def digest(policy: Policy) -> str:
    """SHA-256 over all parameters, bit by bit, in their order."""
    sha = hashlib.sha256()
    for parameter in policy.parameters():
        # Of a copy: memory that numpy has seen can no longer be moved.
        sha.update(parameter.detach().clone().numpy().data)
    return sha.hexdigest()


def state_bytes(policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """What stays between two sections: parameters, gradients, the optimizer's moments."""
    moments = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return sum(tensor.nbytes for tensor in [*policy.parameters(), *gradients, *moments])


def warm_up() -> None:
    """Train something tiny: what the framework keeps for itself is there before the job's state is."""
    settings = Settings(questions=2, width=96, layers=1)
    generator = torch.Generator().manual_seed(0)
    policy = Policy(width=settings.width, layers=settings.layers)
    policy.reset(generator)
    batch = sample(policy, settings, generator)
    half = [0.0, 1.0] * (settings.batch // 2)
    update(policy, optimizer_of(policy, settings), batch, half, settings, generator)


def accelerator_cpus() -> list[int]:
    return [int(cpu) for cpu in os.environ.get("COSLICE_ACCELERATOR_CPUS", "").split(",") if cpu]


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--questions", type=int, default=16, help="questions per step, 16 answers to each")
    parser.add_argument("--verifier-port", type=int, default=0, help="0: score the answers here")
    options = parser.parse_args()
    # Everything stays off the accelerator's cores but sections, which go where coslice says.
    if others := os.sched_getaffinity(0) - set(accelerator_cpus()):
        keep_on(os.getpid(), others)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warm_up()
    say("ready", pid=os.getpid())
    settings = Settings(questions=options.questions)
    verifier = Verifier(options.task, options.verifier_port)
    Job(settings, verifier, seed=options.seed, steps=options.steps).run()


if __name__ == "__main__":
    main()
