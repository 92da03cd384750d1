"""What this process shares between its handles: one mover; per group one state, one gate hook, one channel.

Made by the first registration of a group, gone with its last handle. A forked child starts with none of it:
its handles are dead, and the parent's channel and buffers are left alone.
"""

import os
import sys
import threading
from collections.abc import Collection
from typing import Any

from coslice.errors import ConfigError
from coslice.gate import GATE
from coslice.workload.buffers import AgentBuffers, LocalBuffers
from coslice.workload.channel import Channel, Identity
from coslice.workload.mover import Mover
from coslice.workload.registry import GroupState, Registration


class Group:
    """One group as this process sees it. ``channel`` is None without an agent."""

    def __init__(self, identity: Identity, agent: str | None, mover: Mover, *, verify: bool) -> None:
        self.identity, self.agent = identity, agent
        buffers = AgentBuffers(shares_device=bool(identity.group) and identity.device == "host")
        self.state = GroupState(identity.group, mover, buffers if agent else LocalBuffers(), verify=verify)
        self.channel = Channel(agent, identity, self.state, buffers) if agent else None

    def add(self, registration: Registration, need: int, cpus: Collection[int]) -> None:
        first = self.state.empty
        self.state.add(registration)
        self.state.settle_if_idle()
        if self.channel is not None:
            self.channel.need = max(self.channel.need, need)
        if first:
            GATE.on_leave(self._section_ended)
            if self.channel is not None:
                self.channel.start(cpus)
        self.refresh()

    def _section_ended(self) -> None:
        """State may have come (optimizers make theirs in a step). Still before anybody may move it."""
        size = self.state.settle()
        if self.channel is not None:
            self.channel.resized(size)

    def refresh(self) -> None:
        if self.channel is not None:
            self.channel.resized(self.state.measure())

    def remove(self, registration: Registration) -> None:
        self.state.remove(registration)
        if self.state.empty:
            GATE.remove_on_leave(self._section_ended)
            if self.channel is not None:
                self.channel.close()
            self.state.buffers.close()
        else:
            self.refresh()


class Process:
    """The groups of this process. Two registrations of one group must agree on who they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mover = Mover()
        self._groups: dict[str, Group] = {}
        self._left_to_parent: list[Any] = []

    def join(
        self, registration: Registration, identity: Identity, *, agent: str | None, need: int, verify: bool
    ) -> Group:
        cpus = GATE.home() if GATE.active else ()  # this thread may be inside a section, and pinned
        self._mover.cpus = cpus or self._mover.cpus
        with self._lock:
            group = self._groups.get(identity.group)
            if group is None or group.state.empty:
                group = Group(identity, agent, self._mover, verify=verify)
                self._groups[identity.group] = group
            elif (group.identity, group.agent) != (identity, agent):
                raise ConfigError(
                    f"this process is in group {identity.group!r} as {group.identity} at {group.agent} and "
                    f"cannot also be {identity} at {agent}: name another group, or close the first handle"
                )
            group.add(registration, need, cpus)
        if (checking := sys.modules.get("coslice.client.recorder")) is not None:
            checking.registered(registration.adapters)
        return group

    def forked(self) -> None:
        # Kept, not dropped: to end the parent's streams is not the child's business.
        self._left_to_parent.append((self._mover, self._groups))
        for group in self._groups.values():
            group.state.forget()
        self._lock, self._mover, self._groups = threading.Lock(), Mover(), {}


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.forked)
