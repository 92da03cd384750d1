"""``coslice top``: the dashboard in a terminal. Once, JSON and the wire: this needs no textual."""

import sys
import threading
from collections.abc import Iterator

import grpc
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coslice.cli.rpc import TIMEOUT, group_status, orchestrator
from coslice.errors import ConfigError, CosliceError
from coslice.observe.rows import GroupRow, leadership, row, seats
from coslice.wire.v1 import coslice_pb2 as pb

console = Console(highlight=False, emoji=False)
STATES = {"empty": "free", "resident": "free"}


class Wire:
    """The orchestrator, as ``top`` asks it: for threads. ``close`` ends what runs."""

    def __init__(self, address: str, group: str = "") -> None:
        self._address, self._group = address, group
        self._stream: grpc.Call | None = None
        self.closed = threading.Event()

    def watch(self) -> Iterator[pb.GetStatusResponse]:
        """Status after status. Raises ``CosliceError`` when the connection ends."""
        with orchestrator(self._address) as stub:
            stream = stub.WatchStatus(pb.GetStatusRequest(group=self._group), wait_for_ready=False)
            self._stream = stream
            if self.closed.is_set():
                stream.cancel()
            yield from stream

    def explain(self, group: str, job: str) -> list[str]:
        try:
            with orchestrator(self._address) as stub:
                said = stub.Explain(pb.ExplainRequest(group=group, job=job), timeout=TIMEOUT)
        except CosliceError as error:
            return [str(error)]
        return list(said.lines)

    def close(self) -> None:
        self.closed.set()
        if self._stream is not None:
            self._stream.cancel()


def top(group: str, *, address: str, once: bool, as_json: bool) -> None:
    """Raises ``ConfigError`` where it cannot draw, ``CosliceError`` where nobody answers."""
    first = group_status(address, group)  # who is not there is told before a screen is taken
    if once:
        _print(first, as_json)
        return
    if as_json:
        _stream(Wire(address, group))
        return
    if not sys.stdout.isatty():
        raise ConfigError(
            "coslice top draws on a terminal, and this is none: use --once for one picture, or --json"
        )
    try:
        from coslice.cli.top_app import TopApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise ConfigError(
            "coslice top draws with textual, which is not installed: pip install 'coslice[top]' "
            "(`coslice top --once` and `coslice status --watch` do without)"
        ) from None
    TopApp(Wire(address, group)).run()


def _stream(wire: Wire) -> None:
    try:
        for state in wire.watch():
            _print(state, as_json=True)
    except KeyboardInterrupt:
        wire.close()


def _print(state: pb.GetStatusResponse, as_json: bool) -> None:
    rows = [row(group) for group in state.groups]
    if as_json:
        known = seats(state.orchestrators, state.now)
        said = {"orchestrator": state.orchestrator, "now": state.now, "orchestrators": known, "groups": rows}
        print(msgspec.json.encode(said).decode(), flush=True)
        return
    if told := leadership(state.orchestrators):
        console.print(f"orchestrator {told}", markup=False)
    if not rows:
        console.print("no groups yet: an agent brings them (`coslice up` or `coslice agent`)")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("group", "lock", "job", "queue", "waits", "trouble"):
        table.add_column(column, justify="right" if column in ("queue", "waits") else "left")
    for one in rows:
        trouble = escape("; ".join(one.trouble))
        table.add_row(escape(one.group), *map(escape, cells(one, state.now, 0.0)), f"[red]{trouble}[/red]")
    console.print(table)
    out = {(node.node, node.drained) for one in rows for node in one.nodes if node.out}
    for name, how in sorted(out):
        console.print(f"node {name}: {how}", style="yellow", markup=False)


def cells(one: GroupRow, now: float, later: float) -> tuple[str, str, str, str]:
    """Lock, job, queue, longest wait. ``later``: seconds since the status was told at ``now``."""
    state = STATES.get(one.state, one.state)
    job = f"{one.job} {max(0.0, now + later - one.since):.1f} s" if state != "free" else ""
    waits = [job.waited_s + later for job in one.jobs if job.place]
    return state, job, str(len(one.waiting) or ""), f"{max(waits):.1f} s" if waits else ""
