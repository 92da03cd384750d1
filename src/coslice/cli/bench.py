"""``coslice bench handoff``: how much the orchestration of a hand-over costs, without any bytes to move.

Everything is real: one orchestrator process (SQLite, synchronous=FULL), one process for each agent, one for
each of the two clients, sockets between them. The figures are reported beside a unary echo of the same stack
against the same server in the same run, because a shared machine's milliseconds say little and ratios much.

A third job with an (empty) state stays on every node, so that each hand-over really asks every agent to make
the next job resident, and each agent answers that both fit.

It fails unless all requests were granted, one after another, in the order in which the orchestrator took
them, and the clients had their turns in that order, none before the end of the last.
"""

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from coslice.agent.processes import start_time
from coslice.cli.bench_client import HOLD_S
from coslice.cli.bench_order import order_of
from coslice.cli.bench_processes import serve, start
from coslice.cli.rpc import agent_status, group_status
from coslice.errors import OperationFailed
from coslice.runtime.journal import read_journals
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc
from coslice.workload import ticket

GROUP = "bench"
SOLO = "solo"
WARM_UP = 30
console = Console(highlight=False, emoji=False)


def bench_handoff(*, nodes: int, rounds: int, upstream: bool, out: Path | None) -> None:
    """``upstream``: the uncontended caller and one of the two that contend speak llm-d's wire."""
    other = "upstream" if upstream else "native"
    with tempfile.TemporaryDirectory(prefix="coslice-bench-") as folder:
        state = Path(folder) / "orchestrator"
        echo, acquire, turns = _measured(Path(folder), state, nodes=nodes, rounds=rounds, other=other)
        order = order_of(read_journals(state / "journal.jsonl").records, GROUP)  # it has ended: all is there
    double = sum(after["granted"] < before["yielded"] for before, after in pairwise(turns))
    figures: dict[str, Any] = {
        "nodes": nodes,
        "rounds": rounds,
        "protocols": ["native", other],
        "echo_ms": _summary(echo),
        "acquire_uncontended_ms": _summary(acquire),
        "handoff_ms": _summary(_handoffs(turns)),
        "requests": order.requests,
        "double_grants": max(order.double_grants, double),
        "out_of_order": order.out_of_order,
        "lost": order.lost,
    }
    for name in ("acquire_uncontended", "handoff"):
        figures[f"{name}_vs_echo"] = round(figures[f"{name}_ms"]["p50"] / figures["echo_ms"]["p50"], 2)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    _print(figures)
    if figures["double_grants"] or figures["out_of_order"] or figures["lost"]:
        raise OperationFailed("the grants above are not first come, first served")
    if [job for job in order.jobs if job != SOLO] != [turn["job"] for turn in turns]:
        raise OperationFailed("the clients' turns are not the orchestrator's grants, one by one")


def _measured(
    folder: Path, state: Path, *, nodes: int, rounds: int, other: str
) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """Milliseconds of echoes and of uncontended acquires, and the turns of the clients that contended."""
    with ExitStack() as stack:
        address = _serve(stack, "orchestrator", state)
        agents = [
            _serve(stack, "agent", folder / f"n{i}", "--node", f"n{i}", "--orchestrator", address)
            for i in range(nodes)
        ]
        _await_nodes(address, nodes)
        echo = _echo(address, rounds)
        solo = _client(stack, address, SOLO, other, "uncontended", rounds)
        acquire = _result(solo)["acquire_ms"]
        if other == "native":  # upstream's cannot declare a need, so nobody's state could stay beside theirs
            for agent in agents:
                stack.enter_context(_anchor(agent))
            _await_contexts(address, nodes)
        pair = [
            _client(stack, address, name, protocol, "contend", rounds)
            for name, protocol in (("a", "native"), ("b", other))
        ]
        turns = sorted(
            (turn for client in pair for turn in _result(client)["turns"]), key=lambda turn: turn["granted"]
        )
        return echo + _echo(address, rounds), acquire, turns


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=f"hand-over across {figures['nodes']} node(s), nothing to move", title_justify="left")
    for column in ("", "p50 ms", "p99 ms", "n", "p50 ÷ echo"):
        table.add_column(column, justify="right" if column else "left")
    for key, label in (
        ("echo", "unary echo, same stack, same run"),
        ("acquire_uncontended", "uncontended acquire"),
        ("handoff", "hand-over: yield → grant"),
    ):
        row = figures[f"{key}_ms"]
        ratio = figures.get(f"{key}_vs_echo", 1.0)
        table.add_row(label, f"{row['p50']:.2f}", f"{row['p99']:.2f}", str(row["n"]), f"{ratio:.2f}")
    console.print(table)
    console.print(
        f"{' and '.join(figures['protocols'])} contended: {figures['requests']} requests, "
        f"{figures['out_of_order']} granted out of order, {figures['double_grants']} twice, "
        f"{figures['lost']} lost (by the orchestrator's journal)"
    )


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        raise OperationFailed("the benchmark measured nothing: a client ended early")
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "n": len(ordered),
    }


def _handoffs(turns: list[dict[str, Any]]) -> list[float]:
    """Milliseconds from one job's yield to the grant of the other's next turn."""
    found = [
        (after["granted"] - before["yielded"]) * 1e3
        for before, after in pairwise(turns)
        if after["job"] != before["job"]
    ]
    return found[WARM_UP:]


# ── servers ────────────────────────────────────────────────────────────────


def _serve(stack: ExitStack, command: str, state: Path, *extra: str) -> str:
    """Start ``coslice orchestrator`` or ``coslice agent`` on a free port; returns its address."""
    arguments = ["--state", str(state), *extra]
    if command == "orchestrator":
        arguments += ["--policy", "fifo"]  # the order of grants is checked against it
    if command == "agent":
        arguments += ["--group", f"{GROUP}:memory=1GiB", "--device", "host"]
    return str(serve(stack, command, *arguments)[1][command])


def _await(what: str, ready: Callable[[], bool], seconds: float = 20.0) -> None:
    # The benchmark is a bystander here: it asks until the picture is complete, outside anything measured.
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise OperationFailed(f"the benchmark's {what} did not come up within {seconds:.0f} s")
        time.sleep(0.05)


def _group(address: str) -> pb.GroupStatus | None:
    return next((group for group in group_status(address).groups if group.group == GROUP), None)


def _await_nodes(address: str, nodes: int) -> None:
    def ready() -> bool:
        group = _group(address)
        return group is not None and sum(node.attached for node in group.nodes) == nodes

    _await("agents", ready)


def _await_contexts(address: str, nodes: int) -> None:
    def ready() -> bool:
        group = _group(address)
        return group is not None and sum(bool(node.contexts) for node in group.nodes) == nodes

    _await("resident job", ready)


# ── measuring ──────────────────────────────────────────────────────────────


def _echo(address: str, rounds: int) -> list[float]:
    """Round trips of the health service: a unary call through the same server, loop and sockets.

    At the pace of the hand-overs: after a pause, processor and scheduler are slower to wake than in a tight
    loop, and a hand-over always comes after one.
    """
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        times = []
        for _ in range(rounds + WARM_UP):
            time.sleep(HOLD_S)
            begin = time.perf_counter()
            stub.Check(request, timeout=5.0)
            times.append((time.perf_counter() - begin) * 1e3)
    return times[WARM_UP:]


@contextmanager
def _anchor(agent: str) -> Iterator[None]:
    """Register an empty state with ``agent`` for as long as the context lasts."""
    end = threading.Event()
    proof = ticket.fetch(agent_status(agent).socket)

    def messages() -> Iterator[pb.WorkloadMessage]:
        yield pb.WorkloadMessage(
            register=pb.Register(
                job="anchor",
                incarnation="bench",
                group=GROUP,
                pid=os.getpid(),
                start_time=start_time(os.getpid()) or 0,
                need_bytes=1,
                modes=["offload"],
                device="host",
                ticket=proof,
            )
        )
        end.wait()

    with grpc.insecure_channel(agent) as channel:
        stream = pb_grpc.AgentStub(channel).Channel(messages())
        answer = next(iter(stream))
        if not answer.HasField("registered"):
            raise OperationFailed(f"the agent refused the benchmark's resident job: {answer}")
        try:
            yield
        finally:
            end.set()
            stream.cancel()


def _client(
    stack: ExitStack, address: str, job: str, protocol: str, mode: str, rounds: int
) -> "subprocess.Popen[str]":
    return start(stack, "coslice.cli.bench_client", address, job, protocol, mode, str(rounds))


def _result(client: "subprocess.Popen[str]") -> dict[str, Any]:
    """Its figures, once it has ended."""
    text, _ = client.communicate()
    if client.returncode != 0:
        raise OperationFailed("a client of the benchmark failed; its error is above")
    return dict(json.loads(text))
