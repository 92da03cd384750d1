"""One copy of frozen weights on a device, for all jobs of the group that are on the same base.

On the host accelerator it is a sealed memory file: processes map it, and the agent keeps it from the first
one's coming to the last one's leaving, over the turns of single jobs. Its bytes are counted once in the
group's device memory and are no job's own (``Member.state_bytes`` and ``usage`` are without them); how they
make a difference to who fits beside whom, the core knows (``Context.common``). Processes come to it by the
buffer socket. Knows no budgets.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from coslice.agent.members import Member, Members
from coslice.agent.tiers.shared import NotShareable, check_digest, check_sealed
from coslice.core.ids import GroupId


@dataclass(slots=True)
class _Copy:
    fd: int
    size: int
    users: set[str] = field(default_factory=set)
    """Names of the buffers (``Member.buffer``) of the processes that map it."""


class CommonCopies:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._copies: dict[tuple[GroupId, str], _Copy] = {}

    def bytes(self, group: GroupId) -> int:
        return sum(copy.size for (of, _), copy in self._copies.items() if of == group)

    def use(self, member: Member, digest: str, size: int, made: int | None) -> int | None:
        """The descriptor of the copy; None: there is none, or it is ``made`` from now on, which belongs to us
        in any case. Raises ``NotShareable``."""
        kept = False
        try:
            self._check(member, digest, size)
            copy = self._copies.get((member.group, digest))
            if copy is not None and copy.size != size:
                raise NotShareable(f"under this digest there are {copy.size} bytes, not {size}")
            if copy is None:
                if made is None:
                    self._check_holders(member, digest)
                    return None
                check_sealed(made, size)
                copy = self._copies[member.group, digest] = _Copy(made, size)
                kept = True
            copy.users.add(member.buffer)
            self._set(member, digest, size, here=True)
            return None if kept else copy.fd
        finally:
            if made is not None and not kept:
                os.close(made)

    def away(self, member: Member, digest: str, size: int, *, for_good: bool) -> None:
        """The process does not map it now; ``for_good``: nor will it. Raises ``NotShareable``."""
        self._check(member, digest, size)
        if (copy := self._copies.get((member.group, digest))) is not None:
            copy.users.discard(member.buffer)
        self._set(member, digest, 0 if for_good else size, here=False)

    def trim(self, group: GroupId, wanted: Callable[[str], bool]) -> None:
        """Let go of copies that nobody maps and no job is about to (``wanted``, by digest)."""
        there = {member.buffer for member in self._members.of_group(group)}
        for (of, digest), copy in list(self._copies.items()):
            if of == group:
                copy.users &= there
                if not copy.users and not wanted(digest):
                    os.close(self._copies.pop((of, digest)).fd)

    def close(self) -> None:
        for copy in self._copies.values():
            os.close(copy.fd)
        self._copies.clear()

    @staticmethod
    def _check(member: Member, digest: str, size: int) -> None:
        check_digest(digest)
        if not member.group or member.device != "host":
            raise NotShareable(
                "a device copy is shared by jobs of one group on the host accelerator; sharing one on a CUDA "
                "device needs an owner process and CUDA IPC, which is not built"
            )
        if size <= 0:
            raise NotShareable("a copy has bytes")

    def _check_holders(self, member: Member, digest: str) -> None:
        """Another copy beside one that an agent before us gave out would be counted as one."""
        for other in self._members.of_group(member.group):
            if other is not member and digest in other.mapped and not other.has_ended:
                raise NotShareable(
                    f"process {other.pid} has it and has not come back to this agent yet: try again"
                )

    @staticmethod
    def _set(member: Member, digest: str, size: int, *, here: bool) -> None:
        member.common.pop(digest, None)
        if size:
            member.common[digest] = size
        (member.mapped.add if here else member.mapped.discard)(digest)
