"""A groups file that is read again while ``coslice up`` or ``coslice agent`` runs.

New groups are opened, what is said of a group anew holds at once, and one that is not in the file any more
is deleted if nobody is in it; else it is kept, and the log says who. Its cores and memory a group keeps until
the next start. A file with a mistake in it changes nothing.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from coslice.agent.app import AgentApp
from coslice.agent.config import GroupDevices
from coslice.cli.plan import every_group, groups_given
from coslice.core.ids import GroupId
from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig

log = logging.getLogger(__name__)
OF_DEVICES = ("cpus=", "memory=")


class GroupsFile:
    """``devices`` and ``configs`` make of the file's lines, as for ``--group``, what agent and orchestrator
    are told; they raise ``ConfigError``. ``opened``: the lines by which they were started. ``orchestrator``
    None: it is another process."""

    def __init__(
        self,
        path: Path,
        *,
        node: str | None,
        opened: Sequence[str],
        agent: AgentApp,
        devices: Callable[[tuple[str, ...]], tuple[GroupDevices, ...]],
        orchestrator: OrchestratorApp | None = None,
        configs: Callable[[tuple[str, ...]], tuple[GroupConfig, ...]] | None = None,
    ) -> None:
        self._path, self._node, self._agent, self._devices = path, node, agent, devices
        self._orchestrator, self._configs = orchestrator, configs
        self._said = _by_name(opened)
        """The line by which each group that is served was opened."""
        self._known = self._with_cores(self._said)
        """Its line now, with the cores that it was given where the file leaves that open."""

    async def reload(self) -> list[str]:
        """Returns what was done, in prose. Raises ``ConfigError``, with nothing done."""
        given = groups_given(None, self._path, node=self._node)
        self._devices(given)  # as at the next start: what would be refused then is a mistake now
        read = _by_name(given)
        lines = {name: _with_devices_of(self._known.get(name), line) for name, line in read.items()}
        self._devices(tuple(lines.values()))
        if self._configs is not None:
            self._configs(tuple(lines.values()))
        for name, line in read.items():
            if name in self._said and _of_devices(line) != _of_devices(self._said[name]):
                log.error("SIGHUP: group %s keeps its cores and memory until the next start", name)
        stay = {name: line for name, line in lines.items() if name in self._known}
        done: list[str] = []
        for name in [name for name in self._known if name not in read]:
            if why := await self._in_use(name):
                log.error("SIGHUP: group %s is not in %s any more, and stays: %s", name, self._path, why)
                stay[name] = self._known[name]
            else:
                done.append(f"group {name} is deleted")
        for name in [name for name in lines if name not in self._known]:
            try:
                self._devices((*stay.values(), lines[name]))
            except ConfigError as error:  # one that stays has its cores
                log.error("SIGHUP: group %s is not opened: %s", name, error)
                continue
            stay[name] = lines[name]
            done += [f"group {name} is new"]
        if self._orchestrator is not None and self._configs is not None:
            done += self._orchestrator.regroup(self._configs(tuple(stay.values())))
        before = {device.group: device for device in self._agent.config.groups}
        devices = self._devices(tuple(stay.values()))
        await self._agent.regroup([before.get(device.group, device) for device in devices])
        self._said = {name: self._said.get(name, line) for name, line in stay.items()}
        self._known = self._with_cores(stay)
        if self._orchestrator is not None:
            await self._agent.wait_ready()  # who is told that a group is new may acquire it
        return done

    def _with_cores(self, lines: dict[str, str]) -> dict[str, str]:
        cores = {device.group: device.cpus for device in self._agent.config.groups}
        return {name: _pinned(line, cores.get(GroupId(name), ())) for name, line in lines.items()}

    async def _in_use(self, name: str) -> str:
        """Why it cannot go; empty: it can, and the orchestrator of this process has it no more."""
        if await self._agent.holds(GroupId(name)):
            return "jobs have processes or state there"
        if self._orchestrator is None:
            return ""
        return await self._orchestrator.delete_idle(name, "it is not in the groups file any more")


class Policies:
    """The same for ``coslice orchestrator``: which nodes serve a group, and with what, their agents say."""

    def __init__(
        self,
        path: Path,
        *,
        orchestrator: OrchestratorApp,
        configs: Callable[[tuple[str, ...]], tuple[GroupConfig, ...]],
    ) -> None:
        self._path, self._orchestrator, self._configs = path, orchestrator, configs

    async def reload(self) -> list[str]:
        """As above. A group that the file does not name any more goes on as it was."""
        read = {config.id: config for config in self._configs(every_group(self._path))}
        known = {config.id: config for config in self._orchestrator.config.groups}
        done = self._orchestrator.regroup(tuple((known | read).values()))
        return [*done, *(f"group {name} is new" for name in read if name not in known)]


def _by_name(lines: Sequence[str]) -> dict[str, str]:
    return {line.partition(":")[0]: line for line in lines}


def _with_devices_of(old: str | None, line: str) -> str:
    """What is said of cores and memory in ``line`` is as it was."""
    if old is None:
        return line
    name, *parts = line.split(":")
    return ":".join((name, *_of_devices(old), *(part for part in parts if not part.startswith(OF_DEVICES))))


def _of_devices(line: str) -> list[str]:
    return [part for part in line.split(":") if part.startswith(OF_DEVICES)]


def _pinned(line: str, cores: tuple[int, ...]) -> str:
    name, *parts = line.split(":")
    if not cores or any(part.startswith("cpus=") for part in parts):
        return line
    return ":".join((name, f"cpus={','.join(map(str, cores))}", *parts))
