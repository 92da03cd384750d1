"""What an orchestrator is told before it starts. Values only: nothing here opens, binds or reads anything.

``check`` refuses what cannot work, in the words of the person who wrote it; ``OrchestratorApp.start`` calls
it.
"""

import math
from typing import Literal

from msgspec import Struct

from coslice.admission.model import MODES, Mode
from coslice.core.group_state import GroupRules
from coslice.core.ids import check_name
from coslice.core.policy import policy_named
from coslice.errors import ConfigError
from coslice.security import listening
from coslice.security.addresses import split_address
from coslice.security.listening import Tls
from coslice.store import check_location, shared

DEFAULT_LISTEN = "127.0.0.1:50051"


class GroupConfig(Struct, frozen=True, kw_only=True):
    id: str
    rank: int = 0
    """Place in the global order of groups; equal ranks are ordered by id."""
    nodes: tuple[str, ...] | None = None
    """None: nodes join when their agents offer the group."""
    policy: str = "fifo"
    admission: Mode = "off"
    """``warn`` says when members slow each other down beyond ``max_slowdown``, ``enforce`` sees to it that
    they do not (docs/planning.md)."""
    max_slowdown: float = 1.10


class OrchestratorConfig(Struct, frozen=True, kw_only=True):
    """All times are in seconds."""

    listen: str = DEFAULT_LISTEN
    """``host:port`` (port 0: any free one) or ``unix:path``."""
    tls: Tls | None = None
    """With it all streams are encrypted, and agents show a certificate, at an address of their own."""
    listen_agents: str | None = None
    """Where agents attach with TLS. None: the port after that of ``listen``."""
    token_secret: str | None = None
    """Secret file that tokens are checked with; None: no tokens are asked for."""
    insecure: bool = False
    """Allow a listen address that other machines can reach, without TLS and tokens."""
    store: str = ":memory:"
    """Path of the SQLite file, or ``:memory:`` (a restart then forgets every lock); ``etcd://…``: shared by
    several orchestrators, one of which leads."""
    advertise: str = ""
    """With a shared store: the address that others are told while this one leads. Empty: where it listens."""
    leader_ttl: float = 5.0
    """So long after its last word a leader is given up."""
    takeover_grace: float = 25.0
    """After another took over: ``session_grace`` of those who were connected before, and nobody is passed
    over until then. By its keepalives a client notices a dead machine only after up to 15 s."""
    journal: str | None = None
    journal_max_bytes: int = 64 << 20
    """Then the journal goes on in a new file; ``journal_keep`` older ones are kept beside it."""
    journal_keep: int = 4
    groups: tuple[GroupConfig, ...] = ()
    open_groups: bool = True
    """An agent that offers a group nobody configured creates it."""
    default_policy: str = "fifo"
    """Of groups that agents create, as the next two."""
    default_admission: Mode = "off"
    default_max_slowdown: float = 1.10
    queue_limit: float = 3600.0
    """Seconds that admission keeps a member waiting for room, at most."""
    session_grace: float = 10.0
    resettle: float = 1.5
    """After a restart no grant passes over a client that is not back yet, for that long at most."""
    confirm_timeout: float = 5.0
    quantum: float = 30.0
    """A holder is asked to give way once it held that long and somebody waited that long."""
    max_hold: float = 3600.0
    on_overrun: Literal["evict", "warn"] = "evict"
    node_loss: float = 60.0
    op_timeout: float = 900.0
    """After that long a connected node that did not finish its part of a swap is left out of the group."""
    hello_timeout: float = 5.0
    max_sessions: int = 10_000
    max_waiters: int = 10_000
    """Requests that wait, in each group."""
    max_groups: int = 1_000
    """With those that agents create."""
    max_requests: int = 256
    """Of one session, asked and not yet confirmed."""
    notes_per_s: float = 100.0
    """Of one session, on average; more are left out of the journal, which says how many."""
    notes_at_once: int = 2_000
    max_message_bytes: int = 4 << 20
    keepalive: float = 10.0
    """How often idle streams are pinged, by either side."""
    stop_grace: float = 1.0


def rules(config: OrchestratorConfig) -> GroupRules:
    return GroupRules(
        session_grace=config.session_grace,
        resettle=config.takeover_grace if shared(config.store) else config.resettle,
        confirm_timeout=config.confirm_timeout,
        quantum=config.quantum,
        max_hold=config.max_hold,
        on_overrun=config.on_overrun,
        node_loss=config.node_loss,
        op_timeout=config.op_timeout,
        max_waiters=config.max_waiters,
    )


def check(config: OrchestratorConfig) -> None:
    """Raise ``ConfigError`` for a configuration that cannot work."""
    try:
        policy_named(config.default_policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    seen: set[str] = set()
    _check_admission(config.default_admission, config.default_max_slowdown)
    for group in config.groups:
        try:
            _check_admission(group.admission, group.max_slowdown)
            check_name("group", group.id)
            policy_named(group.policy)
            for node in group.nodes or ():
                check_name("node", node)
        except ValueError as error:
            raise ConfigError(str(error), data={"group": group.id}) from error
        if group.id in seen:
            raise ConfigError(f"group {group.id!r} is configured twice: remove one", data={"group": group.id})
        seen.add(group.id)
    for name in (
        "session_grace",
        "resettle",
        "confirm_timeout",
        "quantum",
        "max_hold",
        "node_loss",
        "op_timeout",
        "queue_limit",
        "hello_timeout",
        "keepalive",
        "leader_ttl",
        "takeover_grace",
    ):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} is {getattr(config, name)}: give a number of seconds above 0")
    for name in ("max_sessions", "max_waiters", "max_groups", "max_requests", "notes_at_once"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}: a limit is at least 1")
    check_location(config.store, insecure=config.insecure)
    if config.advertise:
        split_address(config.advertise)
    _check_listen(config)


def _check_admission(mode: str, max_slowdown: float) -> None:
    if mode not in MODES:
        raise ConfigError(f"admission: {mode!r} is none of {', '.join(MODES)}")
    if not 1.0 <= max_slowdown < math.inf:
        raise ConfigError(f"max_slowdown is {max_slowdown}: a ratio to the time alone, 1 or more")


def _check_listen(config: OrchestratorConfig) -> None:
    if config.listen.startswith("unix:"):
        if config.tls is not None:
            raise ConfigError(
                f"{config.listen} is local already: TLS is for host:port", data={"listen": config.listen}
            )
        return
    for address in (config.listen, config.listen_agents or config.listen):
        listening.check("orchestrator", address, split_address(address)[0], security(config))


def security(config: OrchestratorConfig) -> listening.Security:
    return listening.Security(config.tls, config.token_secret, config.insecure)


def agents_address(config: OrchestratorConfig) -> str:
    """Where agents attach when there is TLS: the next port; any free one where clients have any, too."""
    if config.listen_agents is not None:
        return config.listen_agents
    host, _, port = config.listen.rpartition(":")
    return f"{host}:{int(port) + 1 if int(port) else 0}"
