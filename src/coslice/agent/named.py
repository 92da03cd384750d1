"""Processes that became members because somebody named them: they register nothing, so a restarted agent
knows them only from here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from coslice.agent.backends.base import ProcessRef
from coslice.agent.processes import alive, start_time
from coslice.errors import ConfigError
from coslice.store import Store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

KEY = "named"


class Named(Struct, frozen=True, kw_only=True):
    backend: str
    processes: tuple[ProcessRef, ...]


class Book(Struct, frozen=True):
    jobs: dict[str, Named] = {}


CODEC = Codec(Book, kind="named-processes")


class NamedProcesses:
    def __init__(
        self,
        store: Store,
        found: Mapping[str, tuple[bytes, int]],
        *,
        adopt: Callable[[str, Sequence[int], str], None],
    ) -> None:
        """``adopt`` makes members of them; raises ``ConfigError``. ``found``: what the store held."""
        self._slot = Slot(store, KEY, CODEC, found.get(KEY))
        self._adopt = adopt
        self._jobs = dict((self._slot.state() or Book()).jobs)
        self._writing = asyncio.Lock()

    async def adopt(self, job: str, pids: Sequence[int], backend: str) -> None:
        """Raises ``ConfigError``."""
        self._adopt(job, pids, backend)
        found = {pid: start_time(pid) for pid in sorted(pids)}
        processes = tuple(ProcessRef(pid, at) for pid, at in found.items() if at is not None)
        self._jobs = {name: named for name, named in self._jobs.items() if _lives(named)}
        self._jobs[job] = Named(backend=backend, processes=processes)
        async with self._writing:
            await self._slot.save(Book(dict(self._jobs)))

    def recall(self) -> list[str]:
        """Those of the last agent that live, members again. Returns why some are not."""
        problems = []
        for job, named in self._jobs.items():
            pids = [each.pid for each in named.processes if alive(each.pid, each.started)]
            try:
                if pids:
                    self._adopt(job, pids, named.backend)
            except ConfigError as error:
                problems.append(
                    f"job {job} (processes {', '.join(map(str, pids))}) is not known again: {error}"
                )
        return problems


def _lives(named: Named) -> bool:
    return any(alive(each.pid, each.started) for each in named.processes)
