"""One job of the soak: trains a little, writes checkpoints as real jobs do, and tells what it saw.

Runs in a process that the soak forked (torch is loaded already, gRPC is not). Everything it says goes as one
JSON line into its job's record, at once, so that a kill loses at most the line that was being written.

The witness of its turns is the kernel, not the orchestrator: for as long as it is inside its accelerator
section it has a lock of its group's file (flock(2)), which nobody else may have at that moment. The kernel
lets go of it when the process dies, and not while it is stopped.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import coslice
from coslice.errors import CosliceError, JobFaulted, LeaseLost, Refused, StateError

WIDTH = 1024
CHECKPOINT_EVERY = 4
"""Phases between two checkpoints: what a killed job has to do again."""
PATIENCE = 0.5
"""Before a refused request is made again, in seconds: nobody tells when the reason has gone."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    job: str
    group: str
    orchestrator: str
    agent: str
    folder: str
    rows: int

    @property
    def record(self) -> Path:
        return Path(self.folder) / "records" / f"{self.job}.jsonl"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoints" / f"{self.job}.pt"

    @property
    def witness(self) -> Path:
        return Path(self.folder) / "witness" / self.group

    @property
    def finish(self) -> Path:
        """Once it exists, jobs give their last word and leave."""
        return Path(self.folder) / "finish"


class Training:
    """A model and its Adam, whose state after n steps follows from its name and n alone."""

    def __init__(self, job: str, rows: int) -> None:
        torch.manual_seed(int.from_bytes(hashlib.sha256(job.encode()).digest()[:6], "big"))
        self.steps = 0
        self.model = torch.nn.Linear(WIDTH, rows, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, foreach=False)
        self.model.weight.grad = torch.zeros_like(self.model.weight)
        self._apply()  # makes the optimizer's state; zero gradients change no weight

    def step(self) -> None:
        """Element by element, so the result does not depend on where in memory the tensors are."""
        self.steps += 1
        target = float(self.steps % 7) - 3.0
        (self.model.weight - target).square().mean().backward()
        self._apply()

    def _apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state[self.model.weight]
        return [self.model.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]

    def digest(self) -> str:
        """Read in place: a copy would be device memory."""
        digest = hashlib.blake2b(str(self.steps).encode(), digest_size=16)
        for tensor in self.tensors():
            digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        draft = path.with_suffix(".draft")
        words = {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(words, draft)
        os.replace(draft, path)

    def load(self, path: Path) -> None:
        words = torch.load(path)
        self.steps = int(words["steps"])
        self.model.load_state_dict(words["model"])
        self.optimizer.load_state_dict(words["optimizer"])


class Job:
    def __init__(self, spec: Spec, incarnation: str) -> None:
        self.spec = spec
        self.random = random.Random(incarnation)
        self._record = os.open(spec.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._witness = os.open(spec.witness, os.O_RDWR | os.O_CREAT, 0o600)
        self.training = Training(spec.job, spec.rows)
        if spec.checkpoint.exists():
            self.training.load(spec.checkpoint)
        self.say("started", incarnation=incarnation, steps=self.training.steps)
        self.before = self.training.digest()
        env = {
            "COSLICE_JOB": spec.job,
            "COSLICE_GROUP": spec.group,
            "COSLICE_INCARNATION": incarnation,
            "COSLICE_AGENT": spec.agent,
            "COSLICE_ORCHESTRATOR": spec.orchestrator,
        }
        os.environ.update(env)
        self.client = coslice.connect()
        self.handle = coslice.workload.register(self.training.model, self.training.optimizer)

    def say(self, what: str, **facts: object) -> None:
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "what": what, **facts})
        os.write(self._record, line.encode() + b"\n")

    def run(self) -> None:
        phases = 0
        while not self.spec.finish.exists():
            time.sleep(self.random.uniform(0.0, 0.5))  # rewards, rollouts: off the accelerator
            phases += self.phase(steps=self.random.randint(1, 3), save=phases % CHECKPOINT_EVERY == 3)
        while not self.phase(steps=0, save=False):
            pass
        self.say("final", steps=self.training.steps, digest=self.before)
        self.client.close()
        self.say("left")

    def phase(self, *, steps: int, save: bool) -> bool:
        """One turn; False if it did not come to one."""
        grant = self.acquire()
        if grant is None:
            return False
        lease = grant.leases[0]
        with self.witnessed(lease.epoch):
            found = self.training.digest()
            if found != self.before:
                self.say("wrong_state", epoch=lease.epoch, steps=self.training.steps)
                raise SystemExit(4)
            for _ in range(steps):
                self.training.step()
            self.before = self.training.digest()
            if save:
                self.training.save(self.spec.checkpoint)
        try:
            self.client.yield_()
        except LeaseLost as lost:
            self.say("lease_lost", epoch=lease.epoch, why=str(lost))
        else:
            self.say("yielded", epoch=lease.epoch)
        return True

    def acquire(self) -> Any:
        if (refusal := self.handle.error) is not None:  # the channel goes on asking by itself
            self.say("not_registered", why=str(refusal))
            time.sleep(PATIENCE)
            return None
        self.say("ask")
        try:
            grant = self.client.acquire()
        except JobFaulted as error:
            self.say("faulted", why=str(error))
            raise SystemExit(3) from None
        except (Refused, ConnectionError, TimeoutError) as error:
            self.say("refused", kind=type(error).__name__, why=str(error))
            time.sleep(PATIENCE)
            return None
        self.say("granted", epoch=grant.leases[0].epoch, restored=grant.restored)
        return grant

    @contextlib.contextmanager
    def witnessed(self, epoch: int) -> Any:
        try:
            fcntl.flock(self._witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say("overlap", epoch=epoch, other=os.pread(self._witness, 200, 0).decode())
            fcntl.flock(self._witness, fcntl.LOCK_EX)
        note = f"{self.spec.job} pid {os.getpid()} epoch {epoch}".ljust(200)
        os.pwrite(self._witness, note.encode(), 0)
        self.say("begin", epoch=epoch)
        yield
        self.say("end", epoch=epoch)
        fcntl.flock(self._witness, fcntl.LOCK_UN)


def live(spec: Spec, incarnation: str) -> int:
    """All of a job's process, from its checkpoint to its end; its exit status."""
    torch.set_num_threads(1)
    job = Job(spec, incarnation)
    try:
        job.run()
    except StateError as error:
        job.say("wrong_state", why=f"{type(error).__name__}: {error}")
        return 4
    except CosliceError as error:
        job.say("broke", why=f"{type(error).__name__}: {error}")
        return 5
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def reference(job: str, rows: int, steps: int) -> str:
    """The digest of an undisturbed run."""
    training = Training(job, rows)
    while training.steps < steps:
        training.step()
    return training.digest()
