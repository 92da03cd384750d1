"""Choosing the leader in etcd: whoever creates the key ``leader`` under a lease of its own leads while the
lease lives.

Every candidate keeps a lease from the start, under which it also says that it stands by. The lease is renewed
every third of its time to live; when no renewal has come through for a whole one, counted from when it was
*sent*, the tenure ends by our own clock too, before etcd can have given the lead to another. Whoever stands
by ends the lease of a leader whose process it knows to be gone (``presence``). What makes a late write
harmless is no clock and no such knowledge: each transaction of the store compares the leader key.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from coslice.store.away import Away
from coslice.store.base import NoAnswer, Store, StoreError
from coslice.store.election import Hearsay, Seat, Tenure
from coslice.store.etcd import EtcdStore
from coslice.store.etcd_api import EtcdApi, Json, after_prefix, decoded, encoded
from coslice.store.etcd_location import EtcdLocation
from coslice.store.presence import Presence, first_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_AGAIN_S = 0.5
"""Between attempts while no member answers: etcd does not tell when it is back."""


class _Lease:
    """Ours, until ``gone`` is set."""

    def __init__(self, id_: str, ttl: float, since: float) -> None:
        self.id, self.ttl, self.until = id_, ttl, since + ttl
        self.gone = asyncio.Event()
        self.reason = ""
        self.tenure: Tenure | None = None

    def lost(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.gone.set()
        if self.tenure is not None:
            self.tenure.end(reason)


class EtcdElection:
    """``seat``: the value of this candidate's key, and of the leader's. ``ttl``: seconds; etcd grants no less
    than its election time-out allows (about 2)."""

    shared = True

    def __init__(self, location: EtcdLocation, *, seat: Seat, ttl: float) -> None:
        self._api = EtcdApi(location)
        self._value = msgspec.json.encode(seat)
        self._ttl = max(1, round(ttl))
        self._key = location.prefix + "leader"
        self._candidates = location.prefix + "candidate/"
        self._lease: _Lease | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.hearsay = Hearsay()
        self._presence, self._away = Presence(), Away()

    async def campaign(self) -> tuple[Tenure, Store]:
        while True:
            self.hearsay.leader = None
            lease = await self._fresh_lease()
            try:
                revision = await self._until(lease, self._win(lease))
            except _LeaseOver:
                log.warning("standing by anew: %s", lease.reason)
                continue
            tenure = lease.tenure = Tenure(revision)
            if lease.gone.is_set():
                continue
            return tenure, EtcdStore(self._api, tenure=tenure, leader=(self._key, revision))

    async def candidates(self) -> list[Seat]:
        start = {"key": encoded(self._candidates), "range_end": after_prefix(self._candidates)}
        answer = await self._api.call("kv/range", start, timeout=2.0)
        seats = [_seat(kv) for kv in answer.get("kvs", ())]
        return [seat for seat in seats if seat is not None]

    def lease_left(self) -> float:
        return self._lease.until - asyncio.get_running_loop().time() if self._lease is not None else 0.0

    async def close(self) -> None:
        await self._drop("this orchestrator stops")
        await self._api.close()

    # ── the lease ──────────────────────────────────────────────────────────

    async def _fresh_lease(self) -> _Lease:
        """The one we have if it lives, or a new one with our candidate key."""
        if self._lease is not None and not self._lease.gone.is_set() and self._lease.tenure is None:
            return self._lease
        await self._drop("a new one is needed")
        while True:
            try:
                lease = await self._grant()
                self._away.answers()
                break
            except NoAnswer as error:
                self._away.says(error)
                await asyncio.sleep(_AGAIN_S * random.uniform(0.5, 1.0))
        self._lease = lease
        self._keeper = asyncio.create_task(self._keep(lease), name="etcd lease")
        return lease

    async def _grant(self) -> _Lease:
        began = asyncio.get_running_loop().time()
        answer = await self._api.call("lease/grant", {"TTL": str(self._ttl)}, timeout=2.0)
        lease = _Lease(str(answer["ID"]), float(answer["TTL"]), began)
        mine = {"key": encoded(self._candidates + lease.id), "value": encoded(self._value), "lease": lease.id}
        await self._api.call("kv/put", mine, timeout=2.0)
        return lease

    async def _drop(self, reason: str) -> None:
        keeper, lease = self._keeper, self._lease
        self._keeper = self._lease = None
        if keeper is None or lease is None:
            return
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        lease.lost(reason)
        with contextlib.suppress(StoreError):  # then it runs out by itself
            await self._api.call("lease/revoke", {"ID": lease.id}, timeout=1.0)

    async def _keep(self, lease: _Lease) -> None:
        loop = asyncio.get_running_loop()
        each = lease.ttl / (3 * self._api.members)
        alarm, said = loop.call_at(lease.until, lease.lost, _silence(lease)), ""
        try:
            while not lease.gone.is_set():
                # the pace of renewals
                await asyncio.sleep(min(lease.ttl / 3, max(0.1, lease.until - loop.time() - lease.ttl / 3)))
                sent = loop.time()
                try:
                    answer = await self._api.call("lease/keepalive", {"ID": lease.id}, timeout=each)
                except StoreError as error:
                    if str(error) != said:  # it is tried ten times a second in the end
                        log.warning("the lease of the leader election could not be renewed: %s", error)
                    said = str(error)
                    continue
                left = float(answer["result"].get("TTL", 0)) if "result" in answer else 0.0
                if left <= 0:
                    lease.lost("the lease in etcd ran out")
                    return
                lease.until, said = sent + lease.ttl, ""
                alarm.cancel()
                alarm = loop.call_at(lease.until, lease.lost, _silence(lease))
        finally:
            alarm.cancel()

    async def _until(self, lease: _Lease, work: "Awaitable[T]") -> T:
        """Its result, unless the lease is lost meanwhile: then ``_LeaseOver``."""
        doing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(lease.gone.wait())
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise _LeaseOver
        finally:
            for task in (doing, gone):
                task.cancel()
            await asyncio.gather(doing, gone, return_exceptions=True)

    # ── the leader's key ───────────────────────────────────────────────────

    async def _win(self, lease: _Lease) -> int:
        """The revision at which the key became ours."""
        while True:
            try:
                answer = await self._api.call("kv/txn", self._claim(lease), timeout=2.0)
            except NoAnswer as error:
                self._away.says(error)
                await asyncio.sleep(_AGAIN_S * random.uniform(0.5, 1.0))
                continue
            self._away.answers()
            revision = int(answer["header"]["revision"])
            if answer.get("succeeded"):
                return revision
            (found,) = answer["responses"]
            kvs = found["response_range"].get("kvs", [])
            if not kvs:
                continue
            if str(kvs[0].get("lease", 0)) == lease.id:  # an answer was lost
                return int(kvs[0]["create_revision"])
            self.hearsay.leader = seat = _seat(kvs[0])
            gone = seat is not None and await first_of(self._vacant(revision + 1), self._gone(seat))
            self.hearsay.leader = None
            if gone:
                await self._unseat(str(kvs[0]["lease"]))
            await self.hearsay.give_way()

    def _claim(self, lease: _Lease) -> Json:
        key = encoded(self._key)
        return {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": encoded(self._value), "lease": lease.id}}],
            "failure": [{"request_range": {"key": key}}],
        }

    async def _gone(self, seat: Seat) -> bool:
        await self._presence.gone(seat)
        return True

    async def _unseat(self, lease: str) -> None:
        """Of a process that is gone. If it is not, it hears of it when it renews its lease."""
        log.warning("nobody listens any more where the leader did: its lease is ended")
        with contextlib.suppress(StoreError):  # another was faster, or it runs out by itself
            await self._api.call("lease/revoke", {"ID": lease}, timeout=2.0)

    async def _vacant(self, revision: int) -> bool:
        """Returns, False, once the key was deleted, or it is unknown whether it was: the watch broke, its
        revision was compacted away, or it moved to another member. Then the caller looks again."""
        began = asyncio.get_running_loop().time()
        create = {"key": encoded(self._key), "start_revision": str(revision), "filters": ["NOPUT"]}
        async with contextlib.aclosing(self._api.watch(create)) as messages:
            async for message in messages:
                if message.get("canceled") or message.get("events"):
                    return False
        if (
            asyncio.get_running_loop().time() - began < _AGAIN_S
        ):  # a watch that breaks at once, again and again
            await asyncio.sleep(_AGAIN_S * random.uniform(0.5, 1.0))
        return False


class _LeaseOver(Exception):
    pass


def _silence(lease: _Lease) -> str:
    return f"etcd confirmed nothing for {lease.ttl:g} s"


def _seat(kv: Json) -> Seat | None:
    try:
        return msgspec.json.decode(decoded(kv.get("value", "")), type=Seat)
    except msgspec.MsgspecError:
        return None
