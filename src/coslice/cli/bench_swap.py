"""``coslice bench swap``: what a swap of real torch state costs, as ratios to plain copies of the same run.

Everything is the product's own path: an orchestrator process, agent processes, job processes with torch
state, sockets between them. Plain copies (memcpy; malloc, memcpy and free) are made by the job processes, of
the same bytes with as many threads, in pairs with the swaps, so that a busy machine slows both.
"""

import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from coslice.cli.bench_processes import serve, start
from coslice.errors import OperationFailed
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

MIB = 1 << 20
console = Console(stderr=True, highlight=False, emoji=False)
TARGETS: dict[str, tuple[str, str]] = {
    "copy_ratio": ("≥ 0.90", "copy stages of a swap, against memcpy of the same bytes"),
    "swap_ratio": ("≥ 0.90", "whole swap, against malloc + memcpy + free"),
    "swap_ratio_huge_pages": ("", "the same, with huge pages under malloc"),
    "incremental_ratio": ("≤ 0.02", "bytes copied after a step on 1 % of the state"),
    "incremental_wall_ratio": ("≤ 1.0", "its wall time, against a full snapshot"),
    "lora_ratio": ("≤ 1.01", "LoRA job: bytes moved a swap, against adapter and optimizer"),
    "elastic_ratio": ("≈ 0.20", "two jobs of 60 %: share of the device that moves, each way"),
    "overlap_ratio": ("≤ 1.1 × limit", "out and in at once, against one after the other"),
    "overlap_limit": ("", "what two plain copies at once gain"),
    "cuda_overhead_ms": ("≤ 20", "agent's own time of a cuda swap of 8 processes, driver faked"),
}


def bench_swap(*, size: int, rounds: int, out: Path | None) -> None:
    figures: dict[str, Any] = {"size": size, "rounds": rounds, "cores": len(os.sched_getaffinity(0))}
    parts: tuple[tuple[str, Callable[[int, int], dict[str, Any]]], ...] = (
        ("one job, told to move", _alone),
        ("two jobs of 60 % each", _elastic),
        ("a LoRA job beside another", _lora),
        ("out and in at once", _overlap),
        ("cuda, on a fake driver", _cuda),
    )
    for what, part in parts:
        console.print(f"{what} …", style="dim")
        figures |= part(size, rounds)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    _print(figures)


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=f"swaps of {figures['size'] // MIB} MiB", title_justify="left")
    for column in ("", "measured", "target"):
        table.add_column(column, justify="left" if not column else "right")
    for key, (target, words) in TARGETS.items():
        if key in figures:
            table.add_row(f"{words} [dim]({key})[/dim]", f"{figures[key]:.3f}", target)
    Console(highlight=False, emoji=False).print(table)
    for note in figures.get("notes", []):
        console.print(note, style="yellow")


# ── the parts ──────────────────────────────────────────────────────────────


def _alone(size: int, rounds: int) -> dict[str, Any]:
    with _Cluster() as cluster:
        agent = cluster.agent("alone", 4 * size)
        job = cluster.job(agent, size=size)
        job.do("keep_aside")
        state = job.do("register", name="alone")
        _swap(agent, "alone")  # the first one makes the host memory
        swaps, outs, backs, plain, huge, copies, memcpy = [], [], [], [], [], [], []
        for _ in range(rounds):
            job.do("step")
            wall, answers = _swap(agent, "alone")
            swaps.append(wall)
            outs.append(answers[0].seconds)
            backs.append(answers[1].seconds)
            copies.append(sum(answer.copy_s for answer in answers))
            plain.append(job.do("plain_swap"))
            huge.append(job.do("plain_swap", huge=True))
            memcpy.append(job.do("memcpy"))
        some, full, copied = [], [], []
        one_percent = max(1, state // (3 * MIB) // 100)
        for _ in range(rounds):
            job.do("incremental", on=False)
            job.do("step")
            full.append(_swap(agent, "alone")[1][0].seconds)
            job.do("incremental", on=True)
            job.do("step", count=one_percent)
            answer = _swap(agent, "alone")[1][0]
            some.append(answer.seconds)
            copied.append(answer.copied_bytes / answer.bytes)
        return {
            "state_bytes": state,
            "threads": job.threads,
            "swap_s": median(swaps),
            "snapshot_s": median(outs),
            "restore_s": median(backs),
            "plain_swap_s": median(plain),
            "copy_s": median(copies),
            "memcpy_s": median(memcpy),
            "copy_ratio": _ratio(memcpy, copies),
            "swap_ratio": _ratio(plain, swaps),
            "swap_ratio_huge_pages": _ratio(huge, swaps),
            "incremental_ratio": median(copied),
            "incremental_wall_ratio": _ratio(some, full),
        }


def _elastic(size: int, rounds: int) -> dict[str, Any]:
    """Both are registered before either runs: one of them is set aside."""
    device = size
    need = device * 6 // 10
    moved = _pair(rounds, device, [{"size": _within(need)}, {"size": _within(need)}], [need, need])
    return {
        "elastic_ratio": median(max(turn["bytes_in"], turn["bytes_out"]) for turn in moved) / device,
        "elastic_in": median(turn["bytes_in"] for turn in moved) / device,
        "elastic_out": median(turn["bytes_out"] for turn in moved) / device,
    }


def _lora(size: int, rounds: int) -> dict[str, Any]:
    """The other job fits beside the frozen base, and beside nothing of the adapter and its optimizer."""
    device = size
    base = device // 2
    trained = max(device // 32, 24 * MIB) // (3 * MIB) * 3 * MIB
    need = base + trained * 4 // 3 + 4 * MIB
    other = device - need + trained
    jobs = [{"size": trained, "base": base}, {"size": _within(other)}]
    moved = _pair(rounds, device, jobs, [need, other])
    bytes_moved = median(max(turn["bytes_in"], turn["bytes_out"]) for turn in moved)
    return {
        "lora_bytes": bytes_moved,
        "adapter_bytes": trained,
        "lora_state_bytes": base + trained,
        "lora_ratio": bytes_moved / trained,
    }


def _within(need: int) -> int:
    """State of a job that uses ``need`` bytes at most: a step brings gradients, a third more."""
    return (need - 8 * MIB) * 3 // 4


def _pair(
    rounds: int, device: int, jobs: Sequence[dict[str, int]], needs: Sequence[int]
) -> list[dict[str, float]]:
    """Two jobs in turn on one device; what moved for each grant, once all has moved before."""
    with _Cluster() as cluster:
        agent = cluster.agent("pair", device)
        pair = [cluster.job(agent, **job) for job in jobs]
        for index, (job, need) in enumerate(zip(pair, needs, strict=True)):
            job.do(
                "register", name=f"job-{index}", group="pair", need=need, orchestrator=cluster.orchestrator
            )
        turns = [job.do("turn") for _ in range(rounds + 2) for job in pair]
        return turns[4:]


def _overlap(size: int, rounds: int) -> dict[str, Any]:
    """Jobs of nearly the whole device, each on a core of its own, as jobs are that do not share them.

    The plain copies are made in processes that register nothing: a device has no room for them. All turns of
    one pair follow each other, and each pair is first as often as the other: the system keeps what one core
    freed for that core, so a turn finds memory at hand or not by what was freed before it.
    """
    device = size // 2
    state = device * 9 // 10
    cores = sorted(os.sched_getaffinity(0))
    with _Cluster() as cluster:
        pairs = []
        for name, settings in (("together", ()), ("serial", ("--backend", "app_channel:overlap=no"))):
            agent = cluster.agent(name, device, *settings)
            pair = [cluster.job(agent, size=state, cores=[cores[i % len(cores)]]) for i in range(2)]
            for index, job in enumerate(pair):
                job.do("register", name=f"{name}-{index}", group=name, orchestrator=cluster.orchestrator)
            pairs.append(pair)
        first, second = [cluster.job(agent, size=state, cores=[cores[i % len(cores)]]) for i in range(2)]
        for job in (first, second):
            job.do("keep_aside")
        walls: list[list[float]] = [[], []]
        for number in range(rounds + 2):
            for which in (0, 1) if number % 2 else (1, 0):
                walls[which] += [job.do("turn")["seconds"] for job in pairs[which]]
        copies = [
            (_both(first, second), first.do("half_swap", back=False) + second.do("half_swap", back=True))
            for _ in range(rounds + 1)
        ]
    at_once, one_by_one = zip(*copies[1:], strict=True)
    together, serial = walls[0][4:], walls[1][4:]
    return {
        "overlap_ratio": _ratio(together, serial),
        "overlap_limit": _ratio(at_once, one_by_one),
        "overlap_s": median(together),
        "serial_s": median(serial),
    }


def _both(out: "_Job", back: "_Job") -> float:
    """A copy out in one process and a copy into fresh memory in another, at the same time."""
    began = time.perf_counter()
    out.tell("half_swap", back=False)
    back.tell("half_swap", back=True)
    out.hear()
    back.hear()
    return time.perf_counter() - began


def _cuda(_size: int, _rounds: int) -> dict[str, Any]:
    from coslice.cli.bench_cuda import measure_cuda_overhead
    from coslice.testing.fake_cuda import CannotBuild

    lacking = [name for name in ("cuda.bindings", "pynvml") if not _importable(name)]
    try:
        if lacking:
            raise CannotBuild(f"{' and '.join(lacking)} cannot be imported: pip install 'coslice[cuda]'")
        return {"cuda_overhead_ms": measure_cuda_overhead().overhead_ms}
    except CannotBuild as error:
        return {"notes": [f"cuda_overhead_ms was not measured: {error}"]}


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over the pairs."""
    return median(a / b for a, b in zip(above, below, strict=True))


def _swap(agent: str, job: str) -> tuple[float, tuple[pb.MoveResponse, pb.MoveResponse]]:
    with grpc.insecure_channel(agent) as channel:
        stub = pb_grpc.AgentStub(channel)
        grpc.channel_ready_future(channel).result(30)
        began = time.perf_counter()
        left = stub.Snapshot(pb.SnapshotRequest(job=job), timeout=120)
        back = stub.Restore(pb.RestoreRequest(job=job), timeout=120)
        return time.perf_counter() - began, (left, back)


# ── processes ──────────────────────────────────────────────────────────────


class _Job:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.threads = 1

    def do(self, verb: str, **arguments: Any) -> Any:
        self.tell(verb, **arguments)
        return self.hear()

    def tell(self, verb: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": verb, "with": arguments}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OperationFailed("a job of the benchmark ended early; its error is above")
        return json.loads(line)["answer"]


class _Cluster:
    """An orchestrator, and what is started beside it; all of it ends with the ``with`` block."""

    def __enter__(self) -> "_Cluster":
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="coslice-bench-")))
        self.orchestrator = self._serve("orchestrator", self._folder / "orchestrator")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def agent(self, name: str, device: int, *settings: str) -> str:
        return self._serve(
            "agent",
            self._folder / name,
            *("--node", name, "--orchestrator", self.orchestrator, "--device", "host"),
            *("--group", f"{name}:memory={device}B", *settings),
        )

    def job(self, agent: str, **state: Any) -> _Job:
        environment = {**os.environ, "COSLICE_AGENT": agent, "GRPC_VERBOSITY": "NONE"}
        process = start(self._stack, "coslice.cli.bench_swap_job", env=environment)
        job = _Job(process)
        job.threads = job.do("begin", **state)
        return job

    def _serve(self, command: str, state: Path, *extra: str) -> str:
        return str(serve(self._stack, command, "--state", str(state), *extra)[1][command])
