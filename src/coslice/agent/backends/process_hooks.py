"""A job's own callbacks around a whole-process swap, as given to ``coslice.workload.register``.

Take NCCL communicators down before the driver freezes the processes, make them anew after. They run in the
members that opened a channel; a job without any has nothing to be asked.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from coslice.agent.backends.base import MoveError
from coslice.agent.members import BACK, OUT, Member, MoveRefused
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)


class Hooks:
    def __init__(self, *, timeout: float, section_wait: float) -> None:
        self._timeout, self._section_wait = timeout, section_wait

    @asynccontextmanager
    async def around(self, members: Sequence[Member], op: str) -> AsyncIterator[None]:
        """``on_snapshot`` in every member first; ``on_restore`` again if what follows fails."""
        asked = [member for member in members if member.connected]
        results = await asyncio.gather(*(self._out(member, op) for member in asked), return_exceptions=True)
        done = [m for m, result in zip(asked, results, strict=True) if not isinstance(result, BaseException)]
        failures = [result for result in results if isinstance(result, BaseException)]
        try:
            if failures:
                raise _as_move_error(failures)
            yield
        except BaseException:
            await self._undo(done, op)
            raise

    async def back(self, members: Sequence[Member], op: str) -> None:
        """``on_restore`` in every member that owes it; raises ``MoveError``, and may be called again."""
        asked = [member for member in members if member.connected and member.parked]
        results = await asyncio.gather(*(self._in(member, op) for member in asked), return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            raise _as_move_error(failures)

    async def _undo(self, members: Sequence[Member], op: str) -> None:
        results = await asyncio.gather(
            *(self._in(member, f"{op}/rollback") for member in members), return_exceptions=True
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                log.error("job %s: on_restore of process %d: %s", member.job, member.pid, result)

    async def _out(self, member: Member, op: str) -> None:
        move = pb.MoveOut(op=f"{op}{OUT}", mode="offload", deadline_s=self._section_wait)
        await member.move(move.op, pb.WorkloadCommand(move_out=move), timeout=self._timeout)

    async def _in(self, member: Member, op: str) -> None:
        move = pb.MoveIn(op=f"{op}{BACK}", deadline_s=self._timeout)
        await member.move(move.op, pb.WorkloadCommand(move_in=move), timeout=self._timeout)


def _as_move_error(failures: Sequence[BaseException]) -> MoveError:
    for failure in failures:
        if not isinstance(failure, MoveRefused):
            raise failure
    refusals = [failure for failure in failures if isinstance(failure, MoveRefused)]
    return MoveError(
        "; ".join(str(refusal) for refusal in refusals),
        busy=all(refusal.busy for refusal in refusals),
        pid=refusals[0].pid,
    )
