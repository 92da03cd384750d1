"""``coslice forget``, ``evict`` and ``delete-group``: what an administrator may do to jobs and groups."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from coslice.errors import ConfigError

if TYPE_CHECKING:  # imported only by the command that runs
    from google.protobuf.message import Message

    from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

TIMEOUT = 5.0

Address = Annotated[
    str,
    typer.Option(
        "--orchestrator", "-o", envvar="COSLICE_ORCHESTRATOR", metavar="HOST:PORT", help="Where it listens."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
OneGroup = Annotated[
    str, typer.Option("--group", "-g", metavar="NAME", help="Only there. Default: everywhere.")
]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Told to those who are affected.")]
DEFAULT = "127.0.0.1:50051"


def add(app: typer.Typer) -> None:
    app.command()(forget)
    app.command()(evict)
    app.command("delete-group")(delete_group)


def forget(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    group: OneGroup = "",
    address: Address = DEFAULT,
    as_json: Json = False,
) -> None:
    """Clear what is left of a job that is over: its fault, its lost state, its records.

    A job whose processes are connected, or that holds a lease, is refused: stop it, or evict it.
    """
    from coslice.wire.v1 import coslice_pb2 as pb

    with stub_of(address) as stub:
        answer = stub.Forget(pb.ForgetRequest(job=job, group=group), timeout=TIMEOUT)
    if _printed(answer, as_json):
        return
    print(f"{job} is forgotten in {', '.join(answer.groups)}.")
    if answer.nodes_away:
        print(f"Not connected, so they still remember it: {', '.join(answer.nodes_away)}.")


def evict(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    group: OneGroup = "",
    reason: Why = "",
    address: Address = DEFAULT,
    as_json: Json = False,
) -> None:
    """Take a job's lease and its places in queues away, now. It is told why, and may ask again.

    Its process goes on; its state leaves the device when the next job needs the room.
    """
    from coslice.wire.v1 import coslice_pb2 as pb

    with stub_of(address) as stub:
        answer = stub.Evict(pb.EvictRequest(job=job, group=group, reason=reason), timeout=TIMEOUT)
    if _printed(answer, as_json):
        return
    for what, groups in (("lost its lease on", answer.held), ("waits no longer for", answer.waited)):
        if groups:
            print(f"{job} {what} {', '.join(groups)}.")


def delete_group(
    group: Annotated[str, typer.Argument(metavar="GROUP")],
    reason: Why = "",
    address: Address = DEFAULT,
    as_json: Json = False,
) -> None:
    """End a group: its lease ends, and everybody who waits for it is told that it is gone.

    An agent that is started with the group brings it back: take it out of the agents first.
    """
    from coslice.wire.v1 import coslice_pb2 as pb

    with stub_of(address) as stub:
        answer = stub.DeleteGroup(pb.DeleteGroupRequest(group=group, reason=reason), timeout=TIMEOUT)
    if _printed(answer, as_json):
        return
    print(f"group {group} is deleted.")
    if answer.holder:
        print(f"{answer.holder} lost its lease.")
    if answer.waiters:
        print(f"Told that it is gone: {', '.join(answer.waiters)}.")


@contextmanager
def stub_of(address: str) -> "Iterator[pb_grpc.OrchestratorStub]":
    """What the orchestrator refuses is said in its own words."""
    import grpc

    from coslice.cli.rpc import orchestrator

    refused = (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    with orchestrator(address) as stub:
        try:
            yield stub
        except grpc.RpcError as error:
            if error.code() in refused:
                raise ConfigError(error.details() or error.code().name) from None
            raise


def _printed(answer: "Message", as_json: bool) -> bool:
    from google.protobuf.json_format import MessageToDict

    if as_json:
        said = MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(said))
    return as_json
