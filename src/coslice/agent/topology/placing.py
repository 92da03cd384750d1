"""Makes the agent serve what a view says: its groups, and in them the processes of labelled pods.

Compares and carries out the difference, so it may be interrupted, repeated or begin anew after a restart. A
group whose label is gone is served until its last process here is gone: what is saved can only come back
here. A pod that is gone takes its processes with it, whether or not the kubelet has ended them yet.

Processes are placed only where the node's backend moves whole processes. Others register themselves, as the
job that their pod's labels name, and their ends are seen as everybody's.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from msgspec import Struct

from coslice.agent.members import Member, Members
from coslice.agent.registry import PLACED
from coslice.agent.topology import pods as processes
from coslice.agent.topology.labels import POD_JOB, Pod, View
from coslice.core.ids import GroupId, Incarnation, JobId

log = logging.getLogger(__name__)

KNOWN_S = 5.0
"""A process that registers waits so long for the first view: less than it waits for an answer."""


class Placed(Struct, frozen=True, order=True):
    group: GroupId
    job: JobId
    pid: int
    started: int


class Placing:
    def __init__(
        self,
        members: Members,
        *,
        serve: Callable[[frozenset[GroupId]], Awaitable[frozenset[GroupId]]],
        place: Callable[[Placed, Incarnation], Awaitable[str]],
        release: Callable[[Member, str], None],
        whole: bool,
    ) -> None:
        """``serve`` begins to serve these groups and those it cannot let go yet, and returns all; ``place``
        makes a member, or says why not; ``whole``: the node's backend moves whole processes."""
        self._members, self._serve, self._place, self._release = members, serve, place, release
        self._whole = whole
        self._view: View | None = None
        self._news, self._applied = asyncio.Event(), asyncio.Event()
        self._said: dict[str, str] = {}

    def heard(self, view: View) -> None:
        self._view = view
        self._news.set()

    async def known(self) -> bool:
        """Has a view been carried out? Waits for the first for a while. Without one nobody can tell whose a
        process is, or which groups there are; a process that was refused for that dials again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                await self._applied.wait()
        return self._applied.is_set()

    def problem(self, job: JobId, pid: int) -> str:
        """Why this process may not register as ``job``; empty: it may, or its pod has no labels of ours."""
        uid = processes.uid_of(pid)
        pod = next((pod for pod in self._view.pods if pod.uid == uid), None) if self._view else None
        if pod is None or pod.job == job:
            return ""
        return (
            f"process {pid} is in pod {pod.name}, whose label {POD_JOB} says {pod.job}, and registers as "
            f"{job}: give it that name (COSLICE_JOB), or the pod another label"
        )

    async def run(self) -> None:
        await self._news.wait()
        while True:
            self._news.clear()
            going = asyncio.create_task(self._members.changed())
            news = asyncio.create_task(self._news.wait())
            await asyncio.sleep(0)  # both are waiting when the first change of ours is made
            try:
                assert self._view is not None
                await self.apply(self._view)
                # Members too: a group may have waited for its last one.
                await asyncio.wait((going, news), return_when=asyncio.FIRST_COMPLETED)
            finally:
                going.cancel()
                news.cancel()

    async def apply(self, view: View) -> None:
        served = await self._serve(view.groups)
        self._applied.set()
        ours = [pod for pod in view.pods if pod.group in served]
        self._mention(view.pods, served)
        wanted = {
            Placed(pod.group, pod.job, pid, started): pod
            for pod, found in self._found(ours)
            for pid, started in found.items()
        }
        for member in self._members:
            key = Placed(member.group, member.job, member.pid, member.started)
            if not member.placed:
                continue
            if key not in wanted:
                self._release(member, "its pod is gone, or has other labels")
            elif self._registered(key):
                self._release(member, "processes of its job registered themselves")
        for key, pod in sorted(wanted.items()):
            if not self._registered(key) and self._member(key) is None:
                why = await self._place(key, self._incarnation(key, pod))
                self._say(pod, f"process {key.pid}: {why}" if why else "")

    def _found(self, pods: list[Pod]) -> Iterable[tuple[Pod, Mapping[int, int]]]:
        if not self._whole or not pods:
            return ()
        found = processes.main_processes(pods)
        return ((pod, found.get(pod.uid, {})) for pod in pods)

    def _of(self, key: Placed) -> tuple[Member, ...]:
        return self._members.of_job(key.group, key.job)

    def _registered(self, key: Placed) -> bool:
        return any(not member.placed for member in self._of(key))

    def _member(self, key: Placed) -> Member | None:
        return next((m for m in self._of(key) if (m.pid, m.started) == (key.pid, key.started)), None)

    def _incarnation(self, key: Placed, pod: Pod) -> Incarnation:
        """Pods of one job on one node are one start of it."""
        return next((m.incarnation for m in self._of(key)), Incarnation(f"{PLACED}{pod.uid}"))

    def _mention(self, pods: Iterable[Pod], served: frozenset[GroupId]) -> None:
        seen = {pod.uid for pod in pods}
        self._said = {uid: text for uid, text in self._said.items() if uid in seen}
        for pod in pods:
            if pod.group not in served:
                self._say(pod, f"its group {pod.group} is not served on this node: label the node")

    def _say(self, pod: Pod, text: str) -> None:
        """Once, not with every change of any label."""
        if text and self._said.get(pod.uid) != text:
            log.warning("pod %s, job %s: %s", pod.name, pod.job, text)
        self._said[pod.uid] = text
