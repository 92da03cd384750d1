"""``coslice up``, ``coslice orchestrator``, ``coslice agent``: the long-running processes.

All three are the same shell: build configurations from the options (every mistake is found before anything is
started), start the apps in order, say what to do next, wait for a signal, stop them in reverse order.
"""

import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig, GroupDevices
from coslice.cli.plan import every_group
from coslice.cli.regroup import GroupsFile, Policies
from coslice.cli.serving import Serving, Sight, StateDir, run_until_signal, say, start
from coslice.cli.settings import applied, parse_settings
from coslice.cli.up_config import (
    UpOptions,
    agent_config,
    devices_of,
    group_config,
    known_mode,
    known_policy,
    node_of,
    not_the_agents,
    secured,
)
from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.runtime.heap import Heap
from coslice.runtime.threads import SERVER_S
from coslice.security.files import write_secret
from coslice.security.listening import LOCAL_ONLY, Security
from coslice.security.tokens import AGENT, mint, read_keys
from coslice.sizes import format_size
from coslice.store import DEFAULT_TTL, shared

_OWN_TOKEN_S = 10 * 365 * 86400.0
"""The orchestrator of the same process ends with its agent: its token need not expire before."""


def run_up(options: UpOptions) -> None:
    policy = known_policy(options.policy)
    settings = parse_settings(options.settings, OrchestratorConfig, AgentConfig)
    devices = devices_of(options)  # last: a driver may take seconds to answer
    sight = Sight(options.http, options.otlp, options.security, service="coslice")
    with StateDir(options.state, "up", ephemeral=options.ephemeral) as folder:
        config = OrchestratorConfig(
            listen=options.listen,
            **secured(options.security),
            listen_agents=options.listen_agents,
            store=str(folder / "orchestrator.db"),
            journal=str(folder / "journal.jsonl"),
            groups=tuple(group_config(spec, options, policy) for spec in options.groups or ("default",)),
        )
        orchestrator = OrchestratorApp(applied(config, settings), board=sight.board, tracing=sight.tracing)

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await start(stack, orchestrator)
            own = _OwnToken(options, folder)
            await start(stack, own)
            # The agent dials the address that was really bound: port 0 asks the system for a free one.
            agent = AgentApp(
                agent_config(
                    options, devices, _within(orchestrator.agents_address), folder, settings, own=own.path
                ),
                board=sight.board,
                tracing=sight.tracing,
            )
            await start(stack, agent)
            await agent.wait_ready()
            _announce_up(options, devices, orchestrator.address, agent.address, folder, sight)
            return Serving(
                (orchestrator, agent),
                (*sight.parts(), orchestrator, own, agent),
                _groups_file(options, agent, orchestrator, policy),
                options.security.files(),
            )

        run_until_signal(serve)


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
    name = known_policy(policy)
    said = UpOptions(admission=admission, max_slowdown=max_slowdown)

    def configs(groups: Iterable[str]) -> tuple[GroupConfig, ...]:
        return tuple(group_config(spec, said, name) for spec in groups)

    groups = configs(every_group(groups_file)) if groups_file is not None else ()
    times = parse_settings(settings, OrchestratorConfig)
    sight = Sight(http, otlp, security, service="coslice-orchestrator")
    sys.setswitchinterval(SERVER_S)
    with StateDir(state, "orchestrator", ephemeral=False) as folder:
        config = OrchestratorConfig(
            listen=listen,
            **secured(security),
            listen_agents=listen_agents,
            store=store or str(folder / "orchestrator.db"),
            advertise=advertise,
            leader_ttl=leader_ttl,
            journal=str(folder / "journal.jsonl"),
            groups=groups,
            open_groups=True,
            default_policy=name,
            default_admission=known_mode(admission),
            default_max_slowdown=max_slowdown,
        )
        app = OrchestratorApp(applied(config, times), board=sight.board, tracing=sight.tracing, heap=Heap())

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await start(stack, app)
            agents = f", agents at [b]{app.agents_address}[/b]" if app.agents_address != app.address else ""
            role = "; it leads once it is elected" if store is not None and shared(store) else ""
            say(
                json,
                {"ready": True, "orchestrator": app.address, "agents": app.agents_address, **sight.data()},
                f"orchestrator at [b]{app.address}[/b]{agents}{role}{sight.text()}",
            )
            policies = None
            if groups_file is not None:
                policies = Policies(groups_file, orchestrator=app, configs=configs)
            return Serving((app,), (*sight.parts(), app), policies, security.files())

        run_until_signal(serve)


def run_agent(options: UpOptions) -> None:
    if options.direct and options.groups:
        raise ConfigError("--direct serves no group: leave out --group, or --direct")
    if options.direct and options.topology:
        raise ConfigError("--direct serves no group: leave out --topology, or --direct")
    devices = () if options.direct or (options.topology and not options.groups) else devices_of(options)
    elsewhere = not_the_agents(options)
    settings = parse_settings(options.settings, AgentConfig)
    sight = Sight(options.http, options.otlp, options.security, service="coslice-agent")
    with StateDir(options.state, f"agent-{node_of(options)}", ephemeral=options.ephemeral) as folder:
        agent = AgentApp(
            agent_config(options, devices, None if options.direct else options.listen, folder, settings),
            board=sight.board,
            tracing=sight.tracing,
        )

        async def serve(stack: AsyncExitStack) -> Serving:
            await sight.start(stack)
            await start(stack, agent)
            say(
                options.json,
                {"ready": True, "agent": agent.address, "node": node_of(options), **sight.data()},
                f"agent of node [b]{node_of(options)}[/b] at [b]{agent.address}[/b], "
                f"{'moving state on request' if options.direct else f'dialling {options.listen}'}"
                f"{sight.text()}{elsewhere}",
            )
            files = options.security.files()
            return Serving((agent,), (*sight.parts(), agent), _groups_file(options, agent), files)

        run_until_signal(serve)


def _groups_file(
    options: UpOptions, agent: AgentApp, orchestrator: OrchestratorApp | None = None, policy: str = ""
) -> GroupsFile | None:
    if options.groups_file is None:
        return None

    def configs(groups: tuple[str, ...]) -> tuple[GroupConfig, ...]:
        return tuple(group_config(spec, options, policy) for spec in groups)

    return GroupsFile(
        options.groups_file,
        opened=options.groups,
        node=options.node,
        agent=agent,
        devices=lambda groups: devices_of(replace(options, groups=groups)),
        orchestrator=orchestrator,
        configs=configs,
    )


class _OwnToken:
    """What the agent of ``coslice up`` shows to the orchestrator of the same process, in a file for as long
    as they run: made anew when the secret's keys change."""

    def __init__(self, options: UpOptions, folder: Path) -> None:
        self.path = folder / "own-agent.token"
        self._secret, self._node = options.security.token_secret, node_of(options)
        self._key = b""

    async def start(self) -> None:
        self.reload()

    async def stop(self) -> None:
        self.path.unlink(missing_ok=True)

    def reload(self) -> tuple[str, ...]:
        if self._secret is not None:
            (key, *_) = read_keys(self._secret)
            if key == self._key:
                return ()
            self.path.unlink(missing_ok=True)
            token = mint(key, role=AGENT, name=self._node, expires=time.time() + _OWN_TOKEN_S)
            write_secret(self.path, token.encode())
            self._key = key
        return ()


def _within(address: str) -> str:
    """The same address as seen from this machine, where it is bound to all."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)


def _announce_up(
    options: UpOptions,
    devices: tuple[GroupDevices, ...],
    orchestrator: str,
    agent: str,
    folder: Path,
    sight: Sight,
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
    say(options.json, data, "\n".join(lines))
