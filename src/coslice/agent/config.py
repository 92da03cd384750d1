"""What one agent serves: its groups, their devices, its budgets and its time limits.

Built by the command line (``coslice up``) or by tests, read by everything in ``agent/``. Values only: nothing
here reads the environment or the machine, so a wrong setting is found before anything is started.
"""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from coslice.agent.topology.place import parse_place
from coslice.core.ids import GroupId, NodeId, check_name
from coslice.errors import ConfigError
from coslice.security import listening
from coslice.security.addresses import split_address
from coslice.security.credentials import PLAIN, Credentials
from coslice.security.listening import Tls
from coslice.wire.leader import addresses_of

DEFAULT_LISTEN = "127.0.0.1:9001"
UNIX_PATH_MAX = 107
"""``sun_path`` of ``sockaddr_un`` holds 108 bytes with its terminator (unix(7))."""


class GroupDevices(Struct, frozen=True, kw_only=True):
    """The part of this node that changes hands as one group."""

    group: GroupId
    device_budget: int
    """Bytes that all its jobs together may use on this node's device; cuda: 0 for all there is."""
    accelerator: str = "host"
    """``host`` (CPU cores and a memory budget) or ``cuda``."""
    cpus: tuple[int, ...] = ()
    """The host accelerator's cores. Told to workloads, which pin their sections; the agent pins nothing."""


class Follow(Struct, frozen=True, kw_only=True):
    """A cluster whose labels are followed."""

    place: str
    """``kubernetes``, as for ``--topology``."""
    default: GroupDevices
    """For groups of which nothing is said; its name means nothing."""


class AgentConfig(Struct, frozen=True, kw_only=True):
    node: NodeId
    state_dir: str
    runtime_dir: str
    host_budget: int
    """Bytes of host memory for saved state, all groups together."""
    host_per_job: int = 0
    """Bytes of it that one job may have; 0: all."""
    disk_budget: int = 0
    """Bytes of disk for saved state that was idle for long; 0: none."""
    disk_dir: str = ""
    """Where, in a folder of its own (``coslice-NODE``); empty: ``saved`` in ``state_dir``."""
    groups: tuple[GroupDevices, ...] = ()
    accelerator: str = "host"
    """Of a node without groups: ``host`` or ``cuda``. Where there are groups, they say."""
    follow: Follow | None = None
    """Then labels say which groups are served, and ``groups`` only what is said of some."""
    orchestrator: str | None = None
    """``host:port`` to dial; None: direct API only."""
    listen: str = DEFAULT_LISTEN
    tls: Tls | None = None
    """Encrypts what it serves and, with the certificate as proof, what it dials."""
    token_secret: str | None = None
    """Secret file that tokens are checked with; None: no tokens are asked for."""
    credentials: Credentials = PLAIN
    """Shown to the orchestrator."""
    allow_remote: bool = False
    """Listen beyond loopback without TLS and tokens."""
    retries: int = 3
    """How often a failed move is tried again."""
    on_stuck: Literal["kill", "wait"] = "kill"
    stuck_grace: float = 60.0
    section_wait: float = 30.0
    """How long a workload may take to leave its accelerator section before it answers BUSY, in seconds."""
    move_timeout: float = 120.0
    """After this a workload that has not answered a move has failed it, in seconds."""
    channel_grace: float = 60.0
    """After this a process whose channel ended, and that lives on, has closed it, in seconds."""
    settle: float = 0.5
    """How long memory may take to be seen as free after a workload said so, in seconds."""
    sample_interval: float = 0.05
    max_jobs: int = 64
    """Jobs with registered processes on this node."""
    max_members: int = 1024
    """Registered processes on this node, all jobs together."""
    hello_timeout: float = 10.0
    """How long a channel may be open before it says who it is, in seconds."""
    backend: str = "app_channel"
    """What moves the state of jobs that say nothing themselves."""
    backends: dict[str, dict[str, str]] = {}
    """Settings of backends, by name; which there are says each backend (docs/backends.md)."""


def buffer_socket(config: AgentConfig) -> Path:
    return Path(config.runtime_dir) / "buffers.sock"


def accelerator(config: AgentConfig) -> str:
    """Of this node, where all its groups agree; otherwise ``host``."""
    kinds = {devices.accelerator for devices in config.groups} or {config.accelerator}
    return kinds.pop() if len(kinds) == 1 else "host"


def validate(config: AgentConfig) -> None:
    """Refuse a configuration that cannot work, with what to change; raises ``ConfigError``."""
    try:
        check_name("node", config.node)
        for devices in config.groups:
            check_name("group", devices.group)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    host, _ = split_address(config.listen, example=DEFAULT_LISTEN)
    security = listening.Security(config.tls, config.token_secret, config.allow_remote)
    listening.check("agent", config.listen, host, security)
    if (
        config.follow is not None
        and parse_place(config.follow.place).in_the_clear
        and not config.allow_remote
    ):
        raise ConfigError(
            f"{config.follow.place} would be read over the network in the clear: give https:// and its ca, "
            "or say --insecure"
        )
    if config.orchestrator is not None:
        addresses_of(config.orchestrator)
    if config.host_budget <= 0:
        raise ConfigError(
            f"host_budget is {config.host_budget} bytes: saved state needs host memory, give more"
        )
    if min(config.host_per_job, config.disk_budget) < 0:
        raise ConfigError("host_per_job and disk_budget are bytes, of 0 or more")
    if config.host_per_job > config.host_budget:
        raise ConfigError(
            f"one job may have {config.host_per_job} bytes of host memory, all jobs {config.host_budget}: "
            "give less to one job (--host-per-job) or more to all (--host-memory)"
        )
    if config.disk_budget and config.state_dir == ":memory:" and not config.disk_dir:
        raise ConfigError("a disk tier needs a folder on a disk: name one, or leave the disk budget out")
    if config.accelerator not in ("host", "cuda"):
        raise ConfigError(f"accelerator is {config.accelerator!r}: 'host' or 'cuda'")
    if config.on_stuck not in ("kill", "wait"):
        raise ConfigError(f"on_stuck is {config.on_stuck!r}: choose 'kill' or 'wait'")
    if len(path := str(buffer_socket(config)).encode()) > UNIX_PATH_MAX:
        raise ConfigError(
            f"runtime_dir {config.runtime_dir!r} is too long: a unix socket's path has at most "
            f"{UNIX_PATH_MAX} bytes, this one {len(path)}; choose a shorter directory"
        )
    _check_devices(config.groups)


def _check_devices(groups: tuple[GroupDevices, ...]) -> None:
    seen: set[GroupId] = set()
    owner: dict[int, GroupId] = {}
    for devices in groups:
        if devices.group in seen:
            raise ConfigError(f"group {devices.group!r} is configured twice")
        seen.add(devices.group)
        if devices.accelerator not in ("host", "cuda"):
            raise ConfigError(
                f"group {devices.group!r}: accelerator is {devices.accelerator!r}, not 'host' or 'cuda'"
            )
        if devices.device_budget < 0 or (devices.device_budget == 0 and devices.accelerator == "host"):
            raise ConfigError(
                f"group {devices.group!r}: device_budget is {devices.device_budget} bytes, give more"
            )
        for cpu in devices.cpus:
            if cpu in owner:
                raise ConfigError(
                    f"core {cpu} belongs to group {owner[cpu]!r} and to group {devices.group!r}: "
                    "groups of one node need disjoint devices"
                )
            owner[cpu] = devices.group
