"""Two RL jobs on one Ray cluster, each with a trainer and a sampler actor, share two groups of accelerators.

    coslice up --group train:cpus=0:memory=96MiB --group sample:cpus=1:memory=96MiB &
    COSLICE_ORCHESTRATOR=127.0.0.1:50051 COSLICE_AGENT=127.0.0.1:9001 \\
        python examples/ray_two_jobs.py --staleness 1 --compare --train-cpus 0 --sample-cpus 1 --journal FILE

Every job learns to add two digits, from rewards that arrive late (``--reward-s``, as from a sandbox). With
``--staleness 0`` a step is synchronous: sample, score, train. With N > 0 up to N batches are sampled ahead.
Either way a trainer whose next batch is not there yet gives its accelerators away until it is.

``--compare`` runs the first job alone and then both, and reports from the orchestrator's journal (the line
"journal:" of `coslice up`) for how much of the time each group was held, computed (processor time of the
threads in its sections) and changed hands, and how often. By default a trainer alone computes for about 40 %
of the time. Needs: pip install 'coslice[ray]'. The lines that are coslice's are marked.
"""

import argparse
import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import coslice
from coslice.integrations.ray import get, runtime_env

TRAIN, SAMPLE = "train", "sample"
BATCH, GROUP, WIDTH = 1024, 4, 768


def policy() -> torch.nn.Module:
    torch.set_num_threads(1)
    hidden = torch.nn.Linear(20, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()
    return torch.nn.Sequential(*hidden, torch.nn.Linear(WIDTH, 19))


def encode(questions: np.ndarray) -> torch.Tensor:
    digits = torch.tensor(questions)
    one_hot = torch.nn.functional.one_hot(digits, 10).float()
    return one_hot.flatten(1)


class Member:
    """What trainer and sampler have in common: a model that leaves the device between sections."""

    def __init__(self, pool: str, seed: int, passes: int) -> None:
        self.orchestrator = coslice.connect()  # ← coslice: who we are is in the runtime_env
        self.pool, self.seed, self.passes = pool, seed, passes

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Only for the report: processor time of this section, as a note in the orchestrator's journal."""
        begun = time.thread_time()
        yield
        self.orchestrator.note(f"busy {self.pool}", time.thread_time() - begun)


@ray.remote(num_cpus=0)
class Sampler(Member):
    def setup(self) -> None:
        with self.orchestrator.on_accelerators(phase="init"):  # ← coslice
            self.model = policy()
            coslice.workload.register(model=self.model)  # ← coslice
        self.draw = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)

    def rollout(self, weights: dict[str, np.ndarray], version: int, reward_s: float) -> dict[str, Any]:
        questions = self.draw.integers(0, 10, (BATCH, 2))
        with self.orchestrator.on_accelerators(phase="generate"), self.computing():  # ← coslice
            self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
            with torch.no_grad():
                for _ in range(self.passes):  # stands for the tokens of an answer
                    logits = self.model(encode(questions))
                chosen = torch.distributions.Categorical(logits=logits)
                answers = chosen.sample((GROUP,))
                likely = chosen.log_prob(answers).numpy()
        time.sleep(reward_s)  # the sandbox: off the accelerators
        right = (answers.numpy() == questions.sum(1)).astype(np.float32)
        sampled = {"questions": questions, "answers": answers.numpy(), "likely": likely}
        return {**sampled, "rewards": right, "version": version}


@ray.remote(num_cpus=0)
class Trainer(Member):
    def setup(self) -> None:
        with self.orchestrator.on_accelerators(phase="init"):  # ← coslice
            torch.manual_seed(self.seed)
            self.model = policy()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            coslice.workload.register(model=self.model, optimizer=self.optimizer)  # ← coslice

    def fit(self, sampler: Any, steps: int, staleness: int, reward_s: float) -> dict[str, Any]:
        asked, stalest, rewards = 0, 0, []
        pending: deque[Any] = deque()
        with self.orchestrator.on_accelerators(phase="train"):  # ← coslice
            weights = self.published()
            for step in range(steps):
                while asked < steps and asked <= step + staleness:
                    pending.append(sampler.rollout.remote(weights, step, reward_s))
                    asked += 1
                # ← coslice: ray.get that gives the accelerators away while the batch is not there
                batch = get(pending.popleft(), client=self.orchestrator, phase="train")
                stalest = max(stalest, step - batch["version"])
                with self.computing():
                    self.update(batch)
                    weights = self.published()
                rewards.append(float(batch["rewards"].mean()))
        return {"first": rewards[0], "last": float(np.mean(rewards[-3:])), "stalest": stalest}

    def update(self, batch: dict[str, Any]) -> None:
        rewards = torch.tensor(batch["rewards"])
        advantages = (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-3)
        answers, likely = torch.tensor(batch["answers"]), torch.tensor(batch["likely"])
        for _ in range(self.passes):
            chosen = torch.distributions.Categorical(logits=self.model(encode(batch["questions"])))
            ratio = torch.exp(chosen.log_prob(answers) - likely)  # clipped: batches may be stale
            loss = -torch.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def published(self) -> Any:
        """A copy, made in the section: what is returned from an actor is read after it."""
        return ray.put({name: value.clone().numpy() for name, value in self.model.state_dict().items()})


@ray.remote(num_cpus=0)
class Start:
    """Only for the report: all jobs begin to train at the same moment."""

    def __init__(self, jobs: int) -> None:
        self.missing, self.all_here = jobs, asyncio.Event()

    async def ready(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.all_here.set()
        await self.all_here.wait()


@ray.remote(num_cpus=0)
def job(seed: int, cpus: dict[str, tuple[int, ...]], start: Any, options: argparse.Namespace) -> Any:
    """One job's driver. Here a task, so that one script shows two; usually a script of its own."""
    orchestrator = coslice.connect()
    in_group = {pool: runtime_env(group=pool, cpus=cpus[pool]) for pool in (TRAIN, SAMPLE)}  # ← coslice
    trainer = Trainer.options(runtime_env=in_group[TRAIN]).remote(TRAIN, seed, options.train_passes)
    sampler = Sampler.options(runtime_env=in_group[SAMPLE]).remote(SAMPLE, seed, options.sample_passes)
    with orchestrator.on_accelerators(phase="init"):  # ← coslice: both groups, in one request
        ray.get([trainer.setup.remote(), sampler.setup.remote()])
    ray.get(start.ready.remote())
    return ray.get(trainer.fit.remote(sampler, options.steps, options.staleness, options.reward_s))


def run(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    cpus = {TRAIN: _cores(options.train_cpus), SAMPLE: _cores(options.sample_cpus)}
    start = Start.remote(len(names))
    drivers = [
        job.options(runtime_env=runtime_env(name, (TRAIN, SAMPLE))).remote(seed, cpus, start, options)
        for seed, name in enumerate(names, start=1)
    ]
    results = dict(zip(names, ray.get(drivers), strict=True))
    answer: dict[str, Any] = {"jobs": results}
    if options.journal:
        answer["while"], answer["duty"] = duties(Path(options.journal), names)
    return answer


def duties(journal: Path, names: list[str]) -> tuple[str, dict[str, dict[str, float]]]:
    """Shares of the time in which all of these jobs were training, if they were; and swaps per group."""
    from coslice.runtime.journal import read_journal

    records = read_journal(journal).records
    notes = [(line["t"], line["note"]) for line in records if "note" in line]
    busy = [(at, note) for at, note in notes if note["job"] in names and note["name"].startswith("busy ")]
    times = {
        name: [at for at, note in busy if note["job"] == name and note["name"] == f"busy {TRAIN}"]
        for name in names
    }
    begin, end = max(min(seen) for seen in times.values()), min(max(seen) for seen in times.values())
    while_all = begin < end
    if not while_all:  # a trainer that never waits for a batch gives way to nobody for some seconds
        begin, end = min(min(seen) for seen in times.values()), max(max(seen) for seen in times.values())
    found = {}
    for pool in (TRAIN, SAMPLE):
        computed = sum(n["value"] for at, n in busy if n["name"] == f"busy {pool}" and begin < at <= end)
        seconds, swaps, occupancy, since = {"held": 0.0, "swapping": 0.0}, 0, "", begin
        for line in records:
            if line.get("group") != pool or "state" not in line:
                continue
            if occupancy in seconds:
                seconds[occupancy] += max(0.0, min(line["t"], end) - max(since, begin))
            swaps += line["event"]["type"] == "OpSucceeded" and begin < line["t"] <= end
            occupancy, since = line["state"].get("occupancy", ""), line["t"]
        shares = {"busy": computed, **seconds}
        found[pool] = {name: round(value / (end - begin), 3) for name, value in shares.items()}
        found[pool]["swaps"] = swaps
    return "all trained" if while_all else "some trained", found


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(core) for core in text.split(",") if core)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, default=0, help="batches sampled ahead; 0: synchronous")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--reward-s", type=float, default=1.5, help="how long a batch is scored")
    parser.add_argument("--train-passes", type=int, default=10, help="updates per batch")
    parser.add_argument("--sample-passes", type=int, default=8, help="forward passes per batch")
    parser.add_argument("--jobs", default="a,b")
    parser.add_argument("--compare", action="store_true", help="the first job alone before all together")
    parser.add_argument("--journal", help="of the orchestrator, to report duty cycles from")
    parser.add_argument("--train-cpus", default="", help="cores of the host accelerator of group train")
    parser.add_argument("--sample-cpus", default="", help="cores of the host accelerator of group sample")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default of 15 lets everything else go first on the cores that stand for accelerators here.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=True, object_store_memory=200 * 2**20)
    names = options.jobs.split(",")
    try:
        report: dict[str, Any] = {}
        if options.compare:
            report["alone"] = run([f"{names[0]}-alone"], options)
        report["shared"] = run(names, options)
        if options.compare and options.journal:
            once, twice = (report[run]["duty"][TRAIN]["busy"] for run in ("alone", "shared"))
            report["trainers_busy"] = {"alone": once, "shared": twice, "times": round(twice / once, 2)}
    finally:
        ray.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
