"""``coslice store``: what the orchestrator keeps of its groups, shown, copied to a file and put back."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from coslice.cli.admin import Address, Json
from coslice.errors import ConfigError

store_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Show, back up and restore the state that an orchestrator keeps (docs/operating.md).",
)

State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The state folder of an orchestrator that does not run."),
]
Place = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PLACE",
        help="A store as for [b]coslice orchestrator --store[/b]: etcd://…, kubernetes://… or sqlite:PATH.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="With --store: reach it over the network in the clear.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.1, help="With --store: give up when it is silent for so long."
    ),
]
DEFAULT = "127.0.0.1:50051"
_TIMEOUT = 60.0


class Entry(NamedTuple):
    """One saved value, as far as any version of coslice can read it."""

    key: str
    kind: str
    schema: int
    epoch: int
    deleted: bool
    size: int


@store_app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; mode 0600.")],
    state: State = None,
    store: Place = None,
    address: Address = DEFAULT,
    force: Force = False,
    insecure: Insecure = False,
    timeout: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Copy all saved groups into FILE, while the orchestrator runs or not.

    Without --state and --store the running orchestrator at -o is asked (an administrator's token, where
    tokens are used). A shared store is read itself.
    """
    from coslice.store.backup import write_backup

    values = _read(state, store, address, insecure=insecure, timeout=timeout)
    write_backup(file, values, force=force)
    _print(
        as_json,
        {"file": str(file), **_described(values)},
        f"{file}: {_count(values)}.",
    )


@store_app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As [b]coslice store backup[/b] wrote it.")],
    state: State = None,
    store: Place = None,
    force: Force = False,
    insecure: Insecure = False,
    timeout: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Put a backup into the store of an orchestrator that does not run.

    Refuses while an orchestrator holds the store, and, without --force, if anything is in it. A backup may be
    old: agents report the epochs they saw when they attach, and leases go on above those, so nobody who lives
    is fenced.
    """
    from coslice.security.files import private_directory
    from coslice.store.backup import read_backup
    from coslice.store.reach import replace

    location = _location(state, store, insecure=insecure)
    if location is None:
        raise ConfigError("restore where? Give --state DIR, or --store PLACE")
    values = read_backup(file)
    _check(file, values)
    if state is not None:
        private_directory(state)
    before = asyncio.run(replace(location, values, force=force, patience=timeout))
    _print(
        as_json,
        {"store": location, "replaced": before, **_described(values)},
        f"{location}: {_count(values)} restored" + (f", {before} replaced." if before else "."),
    )


@store_app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A backup. Default: as for [b]backup[/b].")
    ] = None,
    state: State = None,
    store: Place = None,
    address: Address = DEFAULT,
    insecure: Insecure = False,
    timeout: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """What is saved: each group with its schema version and its epoch."""
    from coslice.store.backup import read_backup

    values = (
        read_backup(file)
        if file is not None
        else _read(state, store, address, insecure=insecure, timeout=timeout)
    )
    lines = [
        f"{e.key}: {e.kind} schema {e.schema}, epoch {e.epoch}, {e.size} bytes{', deleted' * e.deleted}"
        for e in map(_entry, values, values.values())
    ]
    _print(as_json, _described(values), "\n".join((*lines, f"{_count(values)}.")))


def _location(state: Path | None, store: str | None, *, insecure: bool) -> str | None:
    from coslice.store import check_location

    if state is not None and store is not None:
        raise ConfigError("--state and --store name two places: give one")
    if store is None:
        return str(state / "orchestrator.db") if state is not None else None
    check_location(store, insecure=insecure)
    return store


def _read(
    state: Path | None, store: str | None, address: str, *, insecure: bool, timeout: float
) -> dict[str, bytes]:
    from coslice.store.reach import read

    location = _location(state, store, insecure=insecure)
    if location is None:
        return _ask(address)
    try:
        return asyncio.run(read(location, patience=timeout))
    except ConfigError as error:
        if "pid" not in error.data:
            raise
        raise ConfigError(
            f"{location} is in use by process {error.data['pid']}: leave out --state and --store, and ask "
            "that orchestrator with -o HOST:PORT",
            data=error.data,
        ) from None


def _ask(address: str) -> dict[str, bytes]:
    """The orchestrator that runs there. A stream that breaks raises: what came so far is no backup."""
    from coslice.cli.admin import stub_of
    from coslice.wire.v1 import coslice_pb2 as pb

    found: dict[str, list[bytes]] = {}
    with stub_of(address) as stub:
        for part in stub.ReadStore(pb.ReadStoreRequest(), timeout=_TIMEOUT):
            found.setdefault(part.key, []).append(part.value)
    return {key: b"".join(parts) for key, parts in found.items()}


def _check(file: Path, values: Mapping[str, bytes]) -> None:
    """Everything in it is a group, or what admission remembers of one, that this version understands."""
    from coslice.orchestrator import admission_store, groups

    for key, value in values.items():
        try:
            if key.startswith(admission_store.KEY):
                admission_store.CODEC.decode(value)
            else:
                groups.CODEC.decode(value)
        except ConfigError as error:
            raise ConfigError(f"{file} cannot be restored; {key}: {error}") from None


def _entry(key: str, value: bytes) -> Entry:
    import msgspec

    try:
        whole: dict[str, Any] = msgspec.json.decode(value, type=dict[str, Any])
        state: dict[str, Any] = whole["state"]
        epoch, deleted = int(state.get("epoch", 0)), bool(state.get("deleted", False))
        return Entry(key, str(whole["kind"]), int(whole["schema"]), epoch, deleted, len(value))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError):
        return Entry(key, "unknown", 0, 0, False, len(value))


def _described(values: Mapping[str, bytes]) -> dict[str, Any]:
    return {"entries": [_entry(key, value)._asdict() for key, value in values.items()]}


def _count(values: Mapping[str, bytes]) -> str:
    return f"{len(values)} saved {'value' if len(values) == 1 else 'values'}"


def _print(as_json: bool, data: Mapping[str, Any], text: str) -> None:
    print(json.dumps(data) if as_json else text)
