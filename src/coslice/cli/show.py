"""``coslice status``, ``explain`` and ``replay``: looking, never touching."""

import json
import sys
from pathlib import Path

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coslice.cli.rpc import TIMEOUT, group_status, orchestrator
from coslice.errors import ConfigError
from coslice.observe.rows import NodeRow, leadership, row
from coslice.sizes import format_size
from coslice.wire.v1 import coslice_pb2 as pb

console = Console(highlight=False, emoji=False)


def show_status(group: str, *, address: str, watch: bool, as_json: bool) -> None:
    if not watch:
        state = group_status(address, group)
        if as_json:
            print(json.dumps(_as_dict(state)))
        else:
            console.print(_page(state))
        return
    with orchestrator(address) as stub:
        stream = stub.WatchStatus(pb.GetStatusRequest(group=group), wait_for_ready=False)
        try:
            _follow(stream, as_json)
        except KeyboardInterrupt:
            stream.cancel()


def _follow(stream: "grpc.CallIterator[pb.GetStatusResponse]", as_json: bool) -> None:
    if as_json:
        for state in stream:
            print(json.dumps(_as_dict(state)), flush=True)
        return
    if not sys.stdout.isatty():
        for state in stream:
            console.print(_page(state))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for state in stream:
            live.update(_page(state), refresh=True)


def _as_dict(message: pb.GetStatusResponse) -> object:
    return MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        use_integers_for_enums=False,
    )


def _page(state: pb.GetStatusResponse) -> Group:
    told = leadership(state.orchestrators)
    head = [Text(f"orchestrator {told}"), Text()] if told else []
    if not state.groups:
        return Group(*head, Text("no groups yet: an agent brings them (`coslice up` or `coslice agent`)"))
    return Group(*head, *(part for group in state.groups for part in (_group(group, state.now), Text())))


def _group(group: pb.GroupStatus, now: float) -> Table:
    moved = f"swaps {group.swaps}, moved {format_size(group.bytes_moved)}"
    table = Table(
        title=f"group {group.group}   {_headline(group, now)}   {moved}",
        title_justify="left",
        title_style="bold",
        expand=False,
    )
    for column in ("job", "lock", "state is", "size", "waits"):
        table.add_column(column)
    about = row(group)
    for job in about.jobs:
        lock, wait = job.lock, f"{job.waited_s:.1f} s  {job.reason}" if job.place else ""
        if job.lost_left_s is not None:
            lock = f"{lock} [yellow]connection lost, {job.lost_left_s:.0f} s left[/yellow]".strip()
        if job.door:
            lock = f"{lock} [yellow]{job.door}[/yellow]".strip()
            wait = wait or job.door_reason
        state = f"[red]faulted[/red]: {escape(job.fault)}" if job.fault else escape(job.where) or "nowhere"
        size = format_size(job.bytes) if job.where else ""
        table.add_row(escape(job.job), lock, state, size, escape(wait))
    if not about.nodes:
        said = "[yellow]no node serves it: start an agent that offers it[/yellow]"
        table.add_row("[dim]nodes[/dim]", "", said, "", "")
    for node in about.nodes:
        budget = f"{format_size(node.device_used)} of {format_size(node.device_budget)}"
        line = f"device {budget}, {_host(node)}" if node.attached else "[red]no agent attached[/red]"
        if node.drained:
            line += f" [yellow]{escape(node.drained)}[/yellow]"
        table.add_row(f"[dim]node {escape(node.node)}[/dim]", "", f"[dim]{line}[/dim]", "", "")
    return table


def _host(node: NodeRow) -> str:
    host = f"host {format_size(node.host_used)} of {format_size(node.host_budget)}"
    if node.disk_budget:
        host += f", disk {format_size(node.disk_used)} of {format_size(node.disk_budget)}"
    if node.short:
        host += " [yellow]host memory is short[/yellow]"
    return host


def _headline(group: pb.GroupStatus, now: float) -> str:
    age = f"{max(0.0, now - group.since):.1f} s"
    match group.state:
        case "held" if group.HasField("lost_left_s"):
            left = f"its connection is lost, {group.lost_left_s:.0f} s left"
            return f"held by {group.job} for {age} (epoch {group.epoch}); {left}"
        case "held":
            return f"held by {group.job} for {age} (epoch {group.epoch})"
        case "swapping":
            return f"swapping in {group.job} for {age} (epoch {group.epoch})"
        case "resident":
            contexts = [context for node in group.nodes for context in node.contexts]
            here = any(context.job == group.job and context.state == pb.LIVE for context in contexts)
            return f"free; {group.job} is still on the device" if here else f"free; {group.job} was the last"
        case _:
            return "free"


def show_explain(group: str, *, job: str, last: int, address: str, as_json: bool) -> None:
    with orchestrator(address) as stub:
        answer = stub.Explain(pb.ExplainRequest(group=group, job=job, last=last), timeout=TIMEOUT)
    if as_json:
        print(json.dumps({"group": group, "lines": list(answer.lines)}))
        return
    for line in answer.lines:
        console.print(escape(line), soft_wrap=True)


def write_replay(journal: Path, out: Path | None, perfetto: Path | None) -> None:
    """``out`` None: a page only if no ``perfetto`` trace is asked for."""
    from coslice.replay.page import render
    from coslice.replay.perfetto import render_perfetto

    if not journal.is_file():
        raise ConfigError(f"there is no journal at {journal}: `coslice up` says where it writes one")
    if out is None and perfetto is None:
        out = Path("replay.html")
    for file, draw, how in (
        (out, render, "open it in any browser"),
        (perfetto, render_perfetto, "open it at https://ui.perfetto.dev"),
    ):
        if file is None:
            continue
        try:
            draw(journal, file)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None
        console.print(f"wrote {escape(str(file))}: {how}")
