"""Choosing the leader in Kubernetes: whoever writes its name into the Lease object leads while it renews it.

The same rules as client-go's leader election: a candidate takes the Lease when the record it saw has not
changed for the whole lease duration *by its own clock* (nobody's clocks are compared), and every change is
made at the resourceVersion that was seen. A leader that could renew nothing for that long, counted from when
it asked, stops by itself. A candidate that knows the leader's process to be gone (``presence``) does not
wait. All this decides only when; that an old leader changes nothing is the store's doing (``kubernetes``).
``leaseTransitions`` is the term. Two annotations are ours: where the leader is dialled, and the last term
that was taken over completely.
"""

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import uuid

import msgspec

from coslice.store.away import Away
from coslice.store.base import NoAnswer, Store, StoreError
from coslice.store.election import Deposed, Hearsay, Seat, Tenure
from coslice.store.kube_api import LEASES, Expired, Json, KubeApi, Missing, Stale
from coslice.store.kube_candidates import Candidates
from coslice.store.kube_location import KubeLocation
from coslice.store.kubernetes import KubernetesStore
from coslice.store.presence import Presence, first_of

log = logging.getLogger(__name__)

SEAT, TAKEN = "coslice/seat", "coslice/taken-over-term"
_AGAIN_S = 0.5
"""Between attempts while the API is away: it does not tell when it is back."""


class LeaseElection:
    """``seat``: where this process is dialled while it leads. ``ttl``: seconds, whole ones."""

    shared = True

    def __init__(self, location: KubeLocation, *, seat: Seat, ttl: float) -> None:
        self._api = KubeApi(location)
        self._name = _name_of(location)
        self._me = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self._seat, self._ttl = seat, max(1, round(ttl))
        self._lease: Json | None = None
        """As we wrote it last, while we lead."""
        self._writing = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._asked = 0.0
        """When we asked for the Lease that we got."""
        self.tenure = Tenure(0)
        self.floor = 0
        self.hearsay = Hearsay()
        self._presence, self._away = Presence(), Away()
        self._until = 0.0
        """While we lead: when we do no longer if nothing more is confirmed."""
        self._known = Candidates(self._api, seat)

    async def campaign(self) -> tuple[Tenure, Store]:
        self.hearsay.leader = None
        self._known.begin()
        await self._stop_keeping()
        while True:
            try:
                lease = await self._attempt()
            except (NoAnswer, Stale, Missing) as error:
                if isinstance(error, NoAnswer):
                    self._away.says(error)
                else:
                    log.info("nobody can be elected yet: %s", error)
                await asyncio.sleep(_AGAIN_S * random.uniform(0.5, 1.0))
                continue
            self._away.answers()
            if lease is not None:
                break
        self._lease = lease
        self.tenure = Tenure(_term(lease))
        self.floor = _taken(lease)
        self._keeper = asyncio.create_task(self._keep(self.tenure, self._asked), name="kubernetes lease")
        await self._known.clear()
        return self.tenure, KubernetesStore(self._api, fence=self)

    async def candidates(self) -> list[Seat]:
        return await self._known.living()

    def lease_left(self) -> float:
        return self._until - asyncio.get_running_loop().time()

    async def close(self) -> None:
        lease = self._lease
        await self._known.close()
        await self._stop_keeping()
        if lease is not None and not self.tenure.over:
            self.tenure.end("this orchestrator stops")
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
            with contextlib.suppress(StoreError):  # then it runs out by itself
                await self._api.replace(LEASES, lease, timeout=1.0)
        await self._api.close()

    # ── for the store ──────────────────────────────────────────────────────

    async def confirm(self) -> None:
        """See ``kubernetes.Fence``."""
        while True:
            self.tenure.check()
            try:
                there = await self._api.get(LEASES, self._name)
                break
            except NoAnswer:
                await asyncio.sleep(_AGAIN_S * random.uniform(0.1, 0.5))
        if not self._ours(there):
            self.tenure.end("another orchestrator was elected")
            raise Deposed("another orchestrator was elected")

    async def taken_over(self) -> None:
        while True:
            self.tenure.check()
            try:
                await self._write({TAKEN: str(self.tenure.term)}, timeout=2.0)
                break
            except NoAnswer:
                await asyncio.sleep(_AGAIN_S * random.uniform(0.1, 0.5))
        self.floor = self.tenure.term

    # ── leading ────────────────────────────────────────────────────────────

    async def _stop_keeping(self) -> None:
        keeper, self._keeper, self._lease = self._keeper, None, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep(self, tenure: Tenure, since: float) -> None:
        loop = asyncio.get_running_loop()
        until = self._until = since + self._ttl
        silence = f"the Kubernetes API confirmed nothing for {self._ttl} s"
        alarm = loop.call_at(until, tenure.end, silence)
        try:
            while not tenure.over:
                pause = min(self._ttl / 3, max(0.1, until - loop.time() - self._ttl / 3))
                await asyncio.sleep(pause)  # the pace of renewals
                sent = loop.time()
                try:
                    await self._write({}, timeout=self._ttl / 3)
                except NoAnswer as error:
                    log.warning("the lease of the leader election could not be renewed: %s", error)
                    continue
                except StoreError as error:
                    tenure.end(str(error))
                    return
                until = self._until = sent + self._ttl
                alarm.cancel()
                alarm = loop.call_at(until, tenure.end, silence)
        finally:
            alarm.cancel()

    async def _write(self, annotations: dict[str, str], *, timeout: float) -> None:
        """Renew, with these annotations. Who only touched the metadata does not matter; raises ``Deposed`` if
        the Lease is another's."""
        async with self._writing:
            while True:
                lease = self._lease
                if lease is None:
                    raise Deposed("this process leads no longer")
                wanted = msgspec.json.decode(msgspec.json.encode(lease))
                wanted["spec"]["renewTime"] = _now()
                wanted["metadata"].setdefault("annotations", {}).update(annotations)
                try:
                    self._lease = await self._api.replace(LEASES, wanted, timeout=timeout)
                    return
                except (Stale, Missing):
                    with contextlib.suppress(Missing):
                        there = await self._api.get(LEASES, self._name, timeout=timeout)
                        if self._ours(there):
                            self._lease = there
                            continue
                    raise Deposed("another orchestrator was elected") from None

    def _ours(self, lease: Json) -> bool:
        return lease["spec"].get("holderIdentity") == self._me and _term(lease) == self.tenure.term

    # ── standing by ────────────────────────────────────────────────────────

    async def _attempt(self) -> Json | None:
        """The Lease, if it became ours; None: look again."""
        try:
            there = await self._api.get(LEASES, self._name)
        except Missing:
            self._asked = asyncio.get_running_loop().time()
            return await self._api.create(LEASES, self._claim(None))
        holder = there["spec"].get("holderIdentity", "")
        if holder and holder != self._me:
            self.hearsay.leader = _seat(there)
            last = await first_of(self._wait(there), self._gone(there))
            if last is None:
                return None
            there = last
            self.hearsay.leader = None
            await self.hearsay.give_way()
        self.hearsay.leader = None
        self._asked = asyncio.get_running_loop().time()
        return await self._api.replace(LEASES, self._claim(there))

    async def _wait(self, seen: Json) -> Json | None:
        """Until the Lease is given up, or was not renewed for its whole time: then as it was last seen. None:
        it is gone, or another's."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _duration(seen)
        version = seen["metadata"]["resourceVersion"]
        """Where the watch goes on: a bookmark's is not the object's."""
        while seen["spec"].get("holderIdentity"):
            began = loop.time()
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    async with contextlib.aclosing(self._api.watch(LEASES, self._name, version)) as events:
                        async for event in events:
                            if event["type"] == "DELETED":
                                return None
                            version = event["object"]["metadata"]["resourceVersion"]
                            if event["type"] == "BOOKMARK":
                                continue
                            if _taken_by_another(event["object"], seen):
                                return None
                            if _record(event["object"]) != _record(seen):
                                deadline = loop.time() + _duration(event["object"])
                                limit.reschedule(deadline)
                            seen = event["object"]
                            self.hearsay.leader = _seat(seen)
                            if not seen["spec"].get("holderIdentity"):
                                return seen
            except TimeoutError:
                return seen
            except (
                Expired
            ):  # what happened since is forgotten. A record that did not change keeps its deadline
                there = await self._api.get(LEASES, self._name)
                if _taken_by_another(there, seen):
                    return None
                if _record(there) != _record(seen):
                    deadline = loop.time() + _duration(there)
                seen, self.hearsay.leader = there, _seat(there)
                version = there["metadata"]["resourceVersion"]
            if loop.time() - began < 0.05:  # it ended at once, and may do so again
                pause = min(_AGAIN_S, max(0.0, deadline - loop.time()))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        return seen

    async def _gone(self, seen: Json) -> Json | None:
        """As ``_wait``, once the process that leads is known to be gone."""
        await self._presence.gone(_seat(seen) or Seat(""))
        log.warning("nobody listens any more where the leader did: its lease is taken")
        there = await self._api.get(LEASES, self._name)
        return None if _taken_by_another(there, seen) else there

    def _claim(self, there: Json | None) -> Json:
        """The Lease as ours. Its term is above every earlier one."""
        meta: Json = dict(there["metadata"]) if there is not None else {"name": self._name}
        seat = msgspec.json.encode(self._seat).decode()
        meta["annotations"] = {**(meta.get("annotations") or {}), SEAT: seat}
        now = _now()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {
                "holderIdentity": self._me,
                "leaseDurationSeconds": self._ttl,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": _term(there) + 1 if there is not None else 1,
            },
        }


async def floor_of(api: KubeApi, location: KubeLocation) -> int:
    """The last term that was taken over completely: what carries an older one does not count."""
    try:
        return _taken(await api.get(LEASES, _name_of(location)))
    except Missing:
        return 0


def _name_of(location: KubeLocation) -> str:
    return f"{location.prefix}-leader"


def _term(lease: Json) -> int:
    return int(lease["spec"].get("leaseTransitions") or 0)


def _taken(lease: Json) -> int:
    return int((lease["metadata"].get("annotations") or {}).get(TAKEN, 0))


def _duration(lease: Json) -> float:
    return float(lease["spec"].get("leaseDurationSeconds") or 1)


def _record(lease: Json) -> tuple[object, ...]:
    """What a renewal changes."""
    spec = lease["spec"]
    return spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions")


def _taken_by_another(lease: Json, seen: Json) -> bool:
    holder = lease["spec"].get("holderIdentity")
    return bool(holder) and holder != seen["spec"].get("holderIdentity")


def _seat(lease: Json) -> Seat | None:
    try:
        return msgspec.json.decode(lease["metadata"]["annotations"][SEAT], type=Seat)
    except (KeyError, TypeError, msgspec.MsgspecError):
        return None


def _now() -> str:
    seconds = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1e6):06d}Z"
