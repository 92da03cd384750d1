"""``coslice drain``: a node out for maintenance, and back.

Says who is still there and whose state stays there; with ``--wait`` it returns when nobody holds anything
there. Whatever ends the wait, the node stays drained.
"""

import json
import os
import pwd
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coslice.cli.admin import DEFAULT, TIMEOUT, Address, Json, Why, stub_of
from coslice.errors import ConfigError

if TYPE_CHECKING:  # imported only by the command that runs
    from coslice.wire.v1 import coslice_pb2 as pb
    from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

TOO_LATE, INTERRUPTED = 1, 130


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it serve again: queues go on at once.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nobody holds anything there.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="With --wait: at most so long."),
    ] = None,
    reason: Why = "",
    address: Address = DEFAULT,
    as_json: Json = False,
) -> None:
    """Take a node out for maintenance: no lease begins there until [b]--undo[/b].

    Who holds it is asked to give way, and finishes its turn. Who has state there keeps it, and its place in
    the queue; a group of several nodes serves the others meanwhile. Kept over restarts of all of us.
    """
    from coslice.wire.v1 import coslice_pb2 as pb

    if undo and wait:
        raise ConfigError("--undo and --wait: a node that serves again is not waited for; leave one out")
    if timeout is not None and not wait:
        raise ConfigError("--timeout is for --wait: add it, or leave --timeout out")
    request = pb.DrainRequest(node=node, undo=undo, reason=reason, by=_by())
    with stub_of(address) as stub:
        answer = stub.Drain(request, timeout=TIMEOUT)
        changed = answer.changed
        if not as_json:
            print("\n".join(_lines(node, answer, undo=undo)), flush=True)
        with _stays(node, waiting=wait):
            in_time = not wait or _wait(stub, answer, node, timeout)
            if wait and as_json:
                answer = stub.Drain(request, timeout=TIMEOUT)
    if as_json:
        print(json.dumps(_data(node, answer, changed=changed, undo=undo)))
    elif wait and in_time:
        print(f"nobody holds anything on {node}: it is out.")
    if not in_time:
        _say(f"after {timeout:g} s it is not out yet. {_next(node)}")
        raise typer.Exit(TOO_LATE)


def _wait(
    stub: "pb_grpc.OrchestratorStub", answer: "pb.DrainResponse", node: str, timeout: float | None
) -> bool:
    """True once nobody is there; False when the time is over. No lease begins there, so one group after the
    other is enough."""
    import grpc

    from coslice.wire.v1 import coslice_pb2 as pb

    until = None if timeout is None else time.monotonic() + timeout
    for group in [one.group for one in answer.groups if _left(one.node)]:
        left = None if until is None else max(0.0, until - time.monotonic())
        told = ""
        stream = stub.WatchStatus(pb.GetStatusRequest(group=group), timeout=left)
        try:
            for state in stream:
                here = [
                    n for one in state.groups for n in one.nodes if n.node == node and n.HasField("drained")
                ]
                if not any(_left(one) for one in here):
                    break
                if (text := f"group {group}: {_left(here[0])}") != told:
                    told = text
                    _say(text)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
                return False
            raise
        finally:
            stream.cancel()
    return True


@contextmanager
def _stays(node: str, *, waiting: bool) -> Iterator[None]:
    """However the wait ends, the node is as it was made."""
    import grpc

    try:
        yield
    except KeyboardInterrupt:
        if waiting:
            _say(f"interrupted. {_next(node)}")
        raise typer.Exit(INTERRUPTED) from None
    except grpc.RpcError as error:
        if waiting and error.code() is grpc.StatusCode.UNAVAILABLE:
            _say(f"the orchestrator is away. {_next(node)}")
        raise


def _next(node: str) -> str:
    return f"{node} stays drained: `coslice drain {node} --wait` waits again, --undo lets it serve."


def _left(node: "pb.NodeStatus") -> str:
    """What it is not out for yet; empty: it is."""
    out = node.drained
    if out.holder:
        return f"{out.holder} holds a lease and was asked to give way"
    return "state is being moved" if out.moving else ""


def _lines(node: str, answer: "pb.DrainResponse", *, undo: bool) -> Iterator[str]:
    already = "" if answer.changed else " already"
    if undo:
        yield f"{node} serves{already}." if already else f"{node} serves again."
        return
    yield f"{node} is drained{already}: no lease begins there until `coslice drain {node} --undo`."
    stays = False
    for one in answer.groups:
        if left := _left(one.node):
            yield f"  group {one.group}: {left}"
        for job, _, text in _states(one.node):
            stays = True
            yield f"  group {one.group}: {job} has {text} there"
    if stays:
        yield (
            "  State stays where it is, also while the agent is stopped or restarted, for as long as the "
            "job's processes live. A reboot ends them, and what is not in their checkpoints is lost."
        )


def _states(node: "pb.NodeStatus") -> Iterator[tuple[str, str, str]]:
    from coslice.sizes import format_size
    from coslice.wire.v1 import coslice_pb2 as pb

    for context in node.contexts:
        if context.state != pb.LOST:
            where = "on the device" if context.state != pb.SAVED else "saved"
            yield context.job, where, f"{format_size(context.bytes)} {where}"


def _data(node: str, answer: "pb.DrainResponse", *, changed: bool, undo: bool) -> dict[str, Any]:
    return {
        "node": node,
        "drained": not undo,
        "changed": changed,
        "out": not undo and not any(_left(one.node) for one in answer.groups),
        "groups": [
            {
                "group": one.group,
                "attached": one.node.attached,
                "holder": one.node.drained.holder,
                "moving": one.node.drained.moving,
                "state": [{"job": job, "where": where} for job, where, _ in _states(one.node)],
            }
            for one in answer.groups
        ],
    }


def _by() -> str:
    """The name that people here know whoever calls by."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
