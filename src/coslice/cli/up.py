"""``coslice up``, ``coslice orchestrator``, ``coslice agent``: the long-running processes.

All three are the same shell: build configurations from the options (every mistake is found before anything is
started), start the apps in order, say what to do next, wait for a signal, stop them in reverse order.
"""

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.markup import escape

from coslice.admission.model import MODES, Mode
from coslice.agent.app import AgentApp
from coslice.agent.backends.resolve import parse_backends
from coslice.agent.config import AgentConfig, Follow, GroupDevices
from coslice.cli.plan import every_group
from coslice.cli.regroup import GroupsFile, Policies
from coslice.cli.settings import Settings, applied, parse_settings
from coslice.core.ids import GroupId, NodeId, check_name
from coslice.core.policy import policy_named
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.observe.tracing import Exporting
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.runtime.heap import Heap
from coslice.runtime.threads import SERVER_S
from coslice.security.credentials import Credentials, credentials_from
from coslice.security.files import private_directory, write_secret
from coslice.security.listening import LOCAL_ONLY, Security
from coslice.security.tokens import AGENT, mint, read_keys
from coslice.sizes import format_size, parse_size
from coslice.store import DEFAULT_TTL, shared

_OWN_TOKEN_S = 10 * 365 * 86400.0
"""The orchestrator of the same process ends with its agent: its token need not expire before."""

log = logging.getLogger(__name__)
console = Console(stderr=True, highlight=False, emoji=False)


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


class Part(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def reload(self) -> tuple[str, ...]:
        """Read files again that may change while it runs; returns what changed. Raises ``ConfigError``."""
        ...


class App(Part, Protocol):
    async def wait(self) -> None:
        """Blocks while all is well."""
        ...


class Serving(NamedTuple):
    apps: Sequence[App]
    """Their end is the end of the process."""
    parts: Sequence[Part]
    """All that are told to read their files again."""
    groups: GroupsFile | Policies | None = None


def run_up(options: UpOptions) -> None:
    policy = _policy(options.policy)
    settings = parse_settings(options.settings, OrchestratorConfig, AgentConfig)
    devices = _devices(options)  # last: a driver may take seconds to answer
    sight = _Sight(options.http, options.otlp, options.security, service="coslice")
    with _StateDir(options.state, "up", ephemeral=options.ephemeral) as folder:
        config = OrchestratorConfig(
            listen=options.listen,
            **_secured(options.security),
            listen_agents=options.listen_agents,
            store=str(folder / "orchestrator.db"),
            journal=str(folder / "journal.jsonl"),
            groups=tuple(_group(spec, options, policy) for spec in options.groups or ("default",)),
        )
        orchestrator = OrchestratorApp(applied(config, settings), board=sight.board, tracing=sight.tracing)

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await _start(stack, orchestrator)
            own = _OwnToken(options, folder)
            await _start(stack, own)
            # The agent dials the address that was really bound: port 0 asks the system for a free one.
            agent = AgentApp(
                _agent_config(
                    options, devices, _within(orchestrator.agents_address), folder, settings, own=own
                ),
                board=sight.board,
                tracing=sight.tracing,
            )
            await _start(stack, agent)
            await agent.wait_ready()
            _announce_up(options, devices, orchestrator.address, agent.address, folder, sight)
            return Serving(
                (orchestrator, agent),
                (*sight.parts(), orchestrator, own, agent),
                _groups_file(options, agent, orchestrator, policy),
            )

        _run_until_signal(serve)


def run_orchestrator(
    *,
    listen: str,
    state: Path | None,
    policy: str,
    store: str | None = None,
    advertise: str = "",
    leader_ttl: float = DEFAULT_TTL,
    admission: str = "off",
    max_slowdown: float = 1.10,
    security: Security = LOCAL_ONLY,
    listen_agents: str | None = None,
    http: str | None = None,
    otlp: str | None = None,
    settings: tuple[str, ...] = (),
    groups_file: Path | None = None,
    json: bool,
) -> None:
    name = _policy(policy)
    said = UpOptions(admission=admission, max_slowdown=max_slowdown)

    def configs(groups: Iterable[str]) -> tuple[GroupConfig, ...]:
        return tuple(_group(spec, said, name) for spec in groups)

    groups = configs(every_group(groups_file)) if groups_file is not None else ()
    times = parse_settings(settings, OrchestratorConfig)
    sight = _Sight(http, otlp, security, service="coslice-orchestrator")
    sys.setswitchinterval(SERVER_S)
    with _StateDir(state, "orchestrator", ephemeral=False) as folder:
        config = OrchestratorConfig(
            listen=listen,
            **_secured(security),
            listen_agents=listen_agents,
            store=store or str(folder / "orchestrator.db"),
            advertise=advertise,
            leader_ttl=leader_ttl,
            journal=str(folder / "journal.jsonl"),
            groups=groups,
            open_groups=True,
            default_policy=name,
            default_admission=_mode(admission),
            default_max_slowdown=max_slowdown,
        )
        app = OrchestratorApp(applied(config, times), board=sight.board, tracing=sight.tracing, heap=Heap())

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await _start(stack, app)
            agents = f", agents at [b]{app.agents_address}[/b]" if app.agents_address != app.address else ""
            role = "; it leads once it is elected" if store is not None and shared(store) else ""
            _say(
                json,
                {"ready": True, "orchestrator": app.address, "agents": app.agents_address, **sight.data()},
                f"orchestrator at [b]{app.address}[/b]{agents}{role}{sight.text()}",
            )
            policies = None
            if groups_file is not None:
                policies = Policies(groups_file, orchestrator=app, configs=configs)
            return Serving((app,), (*sight.parts(), app), policies)

        _run_until_signal(serve)


def run_agent(options: UpOptions) -> None:
    if options.direct and options.groups:
        raise ConfigError("--direct serves no group: leave out --group, or --direct")
    if options.direct and options.topology:
        raise ConfigError("--direct serves no group: leave out --topology, or --direct")
    devices = () if options.direct or (options.topology and not options.groups) else _devices(options)
    elsewhere = _not_the_agents(options)
    settings = parse_settings(options.settings, AgentConfig)
    sight = _Sight(options.http, options.otlp, options.security, service="coslice-agent")
    with _StateDir(options.state, f"agent-{_node(options)}", ephemeral=options.ephemeral) as folder:
        agent = AgentApp(
            _agent_config(options, devices, None if options.direct else options.listen, folder, settings),
            board=sight.board,
            tracing=sight.tracing,
        )

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await _start(stack, agent)
            _say(
                options.json,
                {"ready": True, "agent": agent.address, "node": _node(options), **sight.data()},
                f"agent of node [b]{_node(options)}[/b] at [b]{agent.address}[/b], "
                f"{'moving state on request' if options.direct else f'dialling {options.listen}'}"
                f"{sight.text()}{elsewhere}",
            )
            return Serving((agent,), (*sight.parts(), agent), _groups_file(options, agent))

        _run_until_signal(serve)


# ── configuration ──────────────────────────────────────────────────────────


def _node(options: UpOptions) -> NodeId:
    return NodeId(_checked("node", options.node or socket.gethostname().split(".")[0] or "localhost"))


def _checked(kind: str, text: str) -> str:
    try:
        return check_name(kind, text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _policy(name: str) -> str:
    try:
        policy_named(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return name


def _mode(text: str) -> Mode:
    for mode in MODES:
        if text == mode:
            return mode
    raise ConfigError(f"--admission {text!r}: use {', '.join(MODES)}")


def _group(spec: str, options: UpOptions, policy: str) -> GroupConfig:
    name, values = _settings(spec)
    bound = values.get("max_slowdown")
    try:
        max_slowdown = float(bound) if bound else options.max_slowdown
    except ValueError:
        raise ConfigError(f"{spec!r}: max_slowdown is a number, as in 1.10") from None
    return GroupConfig(
        id=name,
        policy=_policy(values["policy"]) if "policy" in values else policy,
        admission=_mode(values.get("admission") or options.admission),
        max_slowdown=max_slowdown,
    )


def _not_the_agents(options: UpOptions) -> str:
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


def _groups_file(
    options: UpOptions, agent: AgentApp, orchestrator: OrchestratorApp | None = None, policy: str = ""
) -> GroupsFile | None:
    if options.groups_file is None:
        return None

    def configs(groups: tuple[str, ...]) -> tuple[GroupConfig, ...]:
        return tuple(_group(spec, options, policy) for spec in groups)

    return GroupsFile(
        options.groups_file,
        opened=options.groups,
        node=options.node,
        agent=agent,
        devices=lambda groups: _devices(replace(options, groups=groups)),
        orchestrator=orchestrator,
        configs=configs,
    )


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


def _devices(options: UpOptions) -> tuple[GroupDevices, ...]:
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


def _agent_config(
    options: UpOptions,
    devices: tuple[GroupDevices, ...],
    orchestrator: str | None,
    folder: Path,
    settings: Settings,
    *,
    own: "_OwnToken | None" = None,
) -> AgentConfig:
    """``own``: the orchestrator is of this process, and takes our agent without further words."""
    budget = parse_size(options.host_memory) if options.host_memory else _available_memory() // 2
    if options.disk_dir is not None and not options.disk:
        raise ConfigError("--disk-dir says where, but not how much: add --disk SIZE, or leave it out")
    backends = parse_backends(options.backends)
    config = AgentConfig(
        node=_node(options),
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


def _secured(security: Security) -> dict[str, Any]:
    """The security of an orchestrator's configuration."""
    return {"tls": security.tls, "token_secret": security.token_secret, "insecure": security.insecure}


def _credentials(options: UpOptions, *, own: "_OwnToken | None") -> Credentials:
    """What the agent shows to the orchestrator: its certificate; without TLS a token."""
    tls = options.security.tls
    if tls is not None:
        return Credentials(ca=tls.ca, cert=tls.cert, key=tls.key)
    if own is not None and options.security.token_secret is not None:
        return Credentials(token_file=str(own.path))
    return credentials_from(os.environ)


class _OwnToken:
    """What the agent of ``coslice up`` shows to the orchestrator of the same process, in a file for as long
    as they run: made anew when the secret's keys change."""

    def __init__(self, options: UpOptions, folder: Path) -> None:
        self.path = folder / "own-agent.token"
        self._secret, self._node = options.security.token_secret, _node(options)

    async def start(self) -> None:
        self.reload()

    async def stop(self) -> None:
        self.path.unlink(missing_ok=True)

    def reload(self) -> tuple[str, ...]:
        if self._secret is not None:
            (key, *_) = read_keys(self._secret)
            self.path.unlink(missing_ok=True)
            token = mint(key, role=AGENT, name=self._node, expires=time.time() + _OWN_TOKEN_S)
            write_secret(self.path, token.encode())
        return ()


def _within(address: str) -> str:
    """The same address as seen from this machine, where it is bound to all."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)


class _StateDir:
    """The folder of store and journal: kept by default, a temporary one that goes away with ``ephemeral``."""

    def __init__(self, folder: Path | None, name: str, *, ephemeral: bool) -> None:
        self._folder, self._name, self._ephemeral = folder, name, ephemeral

    def __enter__(self) -> Path:
        if self._ephemeral:
            self._path = Path(tempfile.mkdtemp(prefix="coslice-"))
            return self._path
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self._path = self._folder or Path(base) / "coslice" / self._name
        return private_directory(self._path)

    def __exit__(self, *_: object) -> None:
        if self._ephemeral:
            shutil.rmtree(self._path, ignore_errors=True)


class _Sight:
    """What a process shows of itself: its HTTP pages (``--http``) and its traces (``--otlp``)."""

    def __init__(self, http: str | None, otlp: str | None, security: Security, *, service: str) -> None:
        self.board = Board() if http else None
        self._server = HttpServer(self.board, http, security) if http and self.board else None
        self.tracing = Exporting(otlp, service=service) if otlp else None

    async def start(self, stack: AsyncExitStack) -> None:
        """First of all: whoever asks while the rest starts is told so."""
        if self.tracing is not None:
            stack.push_async_callback(asyncio.to_thread, self.tracing.close)
        if self._server is not None:
            await _start(stack, self._server)

    def parts(self) -> "tuple[Part, ...]":
        return () if self._server is None else (self._server,)

    def data(self) -> dict[str, str]:
        return {} if self._server is None else {"http": self._server.url}

    def text(self) -> str:
        if self._server is None or self.board is None:
            return ""
        dashboard = f"\n  dashboard: {self._server.url}/" if "/" in self.board.open else ""
        return f"{dashboard}\n  metrics: {self._server.url}/metrics"


# ── running ────────────────────────────────────────────────────────────────


async def _start(stack: AsyncExitStack, app: Part) -> None:
    # Registered first: a start that fails half-way must be undone as well.
    stack.push_async_callback(app.stop)
    await app.start()


def _run_until_signal(serve: Callable[[AsyncExitStack], Awaitable[Serving]]) -> None:
    """Until a signal, or until a part of an app breaks: then raises ``Crashed``, and the next start takes up
    what was saved. A process that lives on and serves nothing would be worse."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        files: list[Serving] = []
        reading: set[asyncio.Task[None]] = set()
        one_at_a_time = asyncio.Lock()
        await one_at_a_time.acquire()  # whatever changes while it starts is read once it serves
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
        had_terminal = _terminal()

        def hung_up() -> None:
            """By one who changed files, or because the terminal is gone: then there is none any more."""
            if had_terminal and not _terminal():
                stop.set()
            else:
                task = asyncio.ensure_future(_reload(files, one_at_a_time))
                reading.add(task)
                task.add_done_callback(reading.discard)

        loop.add_signal_handler(signal.SIGHUP, hung_up)
        async with AsyncExitStack() as stack:
            serving = asyncio.ensure_future(serve(stack))
            await _first(stop.wait(), serving)  # it may wait for another process, and a signal still ends it
            if serving.done() and not serving.cancelled():
                files.append(serving.result())
                one_at_a_time.release()
                await _first(stop.wait(), *(app.wait() for app in serving.result().apps))
            if console.is_terminal:  # where it is a log, only log lines go
                console.print("stopping …", style="dim")

    asyncio.run(main())


async def _first(*waits: Awaitable[object]) -> None:
    """Until the first of them is over; the others are called off. Raises what that one raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


def _terminal() -> bool:
    """Does this process have a controlling terminal?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _reload(files: Sequence[Serving], one_at_a_time: asyncio.Lock) -> None:
    """``one_at_a_time`` is held while it starts."""
    async with one_at_a_time:
        try:
            parts = [part for serving in files for part in serving.parts]
            changed = list(dict.fromkeys(name for part in parts for name in part.reload()))
        except ConfigError as error:
            log.error("SIGHUP: nothing is changed: %s", error)
            return
        said = ", ".join(changed) or "token secret and certificates are as before"
        for groups in (serving.groups for serving in files if serving.groups is not None):
            try:
                done = await groups.reload()
                said += f"; {', '.join(done) or 'groups are as before'}"
            except ConfigError as error:
                log.error("SIGHUP: groups are as before: %s", error)
        log.warning("SIGHUP: read again: %s. Options and settings need a restart", said)


def _say(as_json: bool, data: dict[str, object], text: str) -> None:
    if as_json:
        print(json.dumps(data), flush=True)
    else:
        console.print(text, soft_wrap=True)


def _announce_up(
    options: UpOptions,
    devices: tuple[GroupDevices, ...],
    orchestrator: str,
    agent: str,
    folder: Path,
    sight: _Sight,
) -> None:
    lines = [f"[b]coslice is up[/b]   orchestrator {orchestrator}   agent {agent}   (Ctrl-C stops both)"]
    for device in devices:
        where = f"cores {','.join(map(str, device.cpus))}" if device.accelerator == "host" else "all GPUs"
        budget = format_size(device.device_budget) if device.device_budget else "all of it"
        lines.append(
            f"  group [b]{device.group}[/b]: {device.accelerator} accelerator, {where}, memory {budget}"
        )
    flag = "" if orchestrator == "127.0.0.1:50051" else f" -o {orchestrator} --agent {agent}"
    group = f" --group {devices[0].group}" if len(devices) > 1 else ""
    lines.append(f"  journal: {escape(str(folder / 'journal.jsonl'))}{sight.text()}")
    lines.append(f"next:  coslice run{flag}{group} --job a -- python train_a.py")
    data: dict[str, object] = {
        "ready": True,
        "orchestrator": orchestrator,
        "agent": agent,
        "groups": [str(device.group) for device in devices],
        "state": str(folder),
        "journal": str(folder / "journal.jsonl"),
        **sight.data(),
    }
    _say(options.json, data, "\n".join(lines))
