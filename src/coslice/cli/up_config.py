"""What the options of ``coslice up``, ``orchestrator`` and ``agent`` mean: every mistake is found here,
before anything is started."""

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coslice.admission.model import MODES, Mode
from coslice.agent.backends.resolve import parse_backends
from coslice.agent.config import AgentConfig, Follow, GroupDevices
from coslice.cli.settings import Settings, applied
from coslice.core.ids import GroupId, NodeId, check_name
from coslice.core.policy import policy_named
from coslice.errors import ConfigError
from coslice.orchestrator.config import GroupConfig
from coslice.security.credentials import Credentials, credentials_from
from coslice.security.listening import LOCAL_ONLY, Security
from coslice.sizes import parse_size


@dataclass(frozen=True)
class UpOptions:
    groups: tuple[str, ...] = ()
    groups_file: Path | None = None
    """Where these are from, to be read again."""
    memory: str | None = None
    cpus: str | None = None
    device: str = "auto"
    host_memory: str | None = None
    host_per_job: str | None = None
    disk: str | None = None
    disk_dir: Path | None = None
    policy: str = "fair_share"
    admission: str = "off"
    max_slowdown: float = 1.10
    listen: str = "127.0.0.1:50051"
    agent_listen: str = "127.0.0.1:9001"
    state: Path | None = None
    ephemeral: bool = False
    node: str | None = None
    topology: str | None = None
    security: Security = LOCAL_ONLY
    listen_agents: str | None = None
    backends: tuple[str, ...] = ()
    direct: bool = False
    """No group and no orchestrator: state moves on request only."""
    http: str | None = None
    otlp: str | None = None
    settings: tuple[str, ...] = ()
    json: bool = False


def node_of(options: UpOptions) -> NodeId:
    return NodeId(_checked("node", options.node or socket.gethostname().split(".")[0] or "localhost"))


def _checked(kind: str, text: str) -> str:
    try:
        return check_name(kind, text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def known_policy(name: str) -> str:
    try:
        policy_named(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return name


def known_mode(text: str) -> Mode:
    for mode in MODES:
        if text == mode:
            return mode
    raise ConfigError(f"--admission {text!r}: use {', '.join(MODES)}")


def group_config(spec: str, options: UpOptions, policy: str) -> GroupConfig:
    name, values = _settings(spec)
    bound = values.get("max_slowdown")
    try:
        max_slowdown = float(bound) if bound else options.max_slowdown
    except ValueError:
        raise ConfigError(f"{spec!r}: max_slowdown is a number, as in 1.10") from None
    return GroupConfig(
        id=name,
        policy=known_policy(values["policy"]) if "policy" in values else policy,
        admission=known_mode(values.get("admission") or options.admission),
        max_slowdown=max_slowdown,
    )


def not_the_agents(options: UpOptions) -> str:
    """What is said of groups that only their orchestrator can keep, for people. Raises ``ConfigError`` where
    it is said to this agent alone."""
    said = [
        (name, key)
        for name, values in map(_settings, options.groups)
        for key in values
        if key in ("policy", "admission", "max_slowdown")
    ]
    if not said:
        return ""
    if options.groups_file is None:
        name, key = said[0]
        raise ConfigError(
            f"--group {name}:{key}=…: that is the orchestrator's, not an agent's. Say it there: coslice "
            f"orchestrator --groups FILE, or --{key.replace('_', '-')} for all groups"
            + (f"; while it runs: coslice policy set {name} POLICY" if key == "policy" else "")
        )
    keys = ", ".join(sorted({key for _, key in said}))
    return f"\n  {keys} of its groups hold where coslice orchestrator reads the same --groups file"


def _settings(spec: str) -> tuple[str, dict[str, str]]:
    """The name of a group, and what is said of it alone."""
    spec, _, policy = spec.partition(":policy=")  # which may have colons of its own
    name, *settings = spec.split(":")
    values: dict[str, str] = {"policy": policy} if policy else {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in ("cpus", "memory", "admission", "max_slowdown") or not value:
            raise ConfigError(
                f"{spec!r}: after the name come cpus=1,2, memory=512MiB, admission=warn, "
                f"max_slowdown=1.1 and last policy=fifo, not {setting!r}"
            )
        values[key] = value
    return name, values


def devices_of(options: UpOptions) -> tuple[GroupDevices, ...]:
    accelerator = _accelerator(options.device)
    specs = options.groups or ("default",)
    free = _free_cores(specs, options) if accelerator == "host" else iter(())
    devices = tuple(_device(spec, options, accelerator, free, len(specs)) for spec in specs)
    names = [device.group for device in devices]
    if len(set(names)) < len(names):
        raise ConfigError(f"a group is named twice: {', '.join(names)}")
    taken: dict[int, str] = {}
    for device in devices:
        for cpu in device.cpus:
            if cpu in taken:
                raise ConfigError(
                    f"groups {taken[cpu]} and {device.group} both want core {cpu}: give each its own, "
                    f"{_where_cores_are_said(options)}"
                )
            taken[cpu] = device.group
    return devices


def _device(
    spec: str, options: UpOptions, accelerator: str, free: Iterator[int], groups: int = 1
) -> GroupDevices:
    """``free``: cores that no group names, for those that leave it open; ``groups``: how many there are."""
    name, values = _settings(spec)
    memory, said = values.get("memory", options.memory), values.get("cpus", options.cpus)
    cpus: tuple[int, ...] = ()
    if accelerator == "host":
        cpus = _cpus(said) if said is not None else tuple(itertools.islice(free, 1))
        if not cpus:
            raise ConfigError(
                f"group {name}: no core of this machine is left for it: every group on a machine without a "
                f"GPU needs one of its own, {_where_cores_are_said(options)}"
            )
    return GroupDevices(
        group=GroupId(_checked("group", name)),
        accelerator=accelerator,
        cpus=cpus,
        device_budget=parse_size(memory) if memory else _default_budget(accelerator) // groups,
    )


def _free_cores(specs: Sequence[str], options: UpOptions) -> Iterator[int]:
    """From the last one down."""
    said = [values.get("cpus", options.cpus) for _, values in map(_settings, specs)]
    named = {cpu for text in said if text is not None for cpu in _cpus(text)}
    return (cpu for cpu in sorted(os.sched_getaffinity(0), reverse=True) if cpu not in named)


def _where_cores_are_said(options: UpOptions) -> str:
    if options.groups_file is not None:
        return f"with cpus = [1, 2] in {options.groups_file}"
    return "with --group NAME:cpus=1,2"


def _accelerator(device: str) -> str:
    if device == "auto":
        from coslice.agent.cuda import cuda_available

        return "cuda" if cuda_available() else "host"
    if device not in ("host", "cuda"):
        raise ConfigError(f"--device {device!r}: use host, cuda or auto")
    if device == "cuda":
        from coslice.agent.cuda import cuda_available

        if not cuda_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; use --device host, or auto")
    return device


def _cpus(text: str) -> tuple[int, ...]:
    present = sorted(os.sched_getaffinity(0))
    try:
        cpus = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of cores: write 1 or 2,3") from None
    missing = [cpu for cpu in cpus if cpu not in present]
    if missing:
        raise ConfigError(f"no such core: {missing}; this process may use {present}")
    return cpus


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _default_budget(accelerator: str) -> int:
    # cuda: the agent asks torch. host: a quarter of what is free, so that there is room for snapshots.
    return _available_memory() // 4 if accelerator == "host" else 0


def _followed(options: UpOptions) -> Follow | None:
    if options.topology is None:
        return None
    accelerator = _accelerator(options.device)
    default = _device("default", options, accelerator, _free_cores(("default",), options))
    return Follow(place=options.topology, default=default)


def agent_config(
    options: UpOptions,
    devices: tuple[GroupDevices, ...],
    orchestrator: str | None,
    folder: Path,
    settings: Settings,
    *,
    own: Path | None = None,
) -> AgentConfig:
    """``own``: the file of our token, where the orchestrator is of this process."""
    budget = parse_size(options.host_memory) if options.host_memory else _available_memory() // 2
    if options.disk_dir is not None and not options.disk:
        raise ConfigError("--disk-dir says where, but not how much: add --disk SIZE, or leave it out")
    backends = parse_backends(options.backends)
    config = AgentConfig(
        node=node_of(options),
        orchestrator=orchestrator,
        tls=options.security.tls,
        token_secret=options.security.token_secret,
        allow_remote=options.security.insecure,
        credentials=_credentials(options, own=own),
        listen=options.agent_listen,
        groups=devices,
        accelerator=devices[0].accelerator if devices else _accelerator(options.device),
        follow=_followed(options),
        host_budget=budget,
        host_per_job=parse_size(options.host_per_job) if options.host_per_job else 0,
        disk_budget=parse_size(options.disk) if options.disk else 0,
        disk_dir=str(options.disk_dir.absolute()) if options.disk_dir is not None else "",
        state_dir=str(folder),
        runtime_dir=str(folder / "run"),
        backend=backends[0].name if backends else "app_channel",
        backends={spec.name: spec.settings for spec in backends},
    )
    return applied(config, settings)


def secured(security: Security) -> dict[str, Any]:
    """The security of an orchestrator's configuration."""
    return {"tls": security.tls, "token_secret": security.token_secret, "insecure": security.insecure}


def _credentials(options: UpOptions, *, own: Path | None) -> Credentials:
    """What the agent shows to the orchestrator: its certificate; without TLS a token."""
    tls = options.security.tls
    if tls is not None:
        return Credentials(ca=tls.ca, cert=tls.cert, key=tls.key)
    if own is not None and options.security.token_secret is not None:
        return Credentials(token_file=str(own))
    return credentials_from(os.environ)
