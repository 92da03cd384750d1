"""Who would lead, in Kubernetes: each candidate renews a Lease object of its own while it lives.

Only for those who look (``coslice status``); the election does not rest on it, so a failure here is logged
and nothing else. Whether one lives is judged by its renewTime and our clock: with clocks that are seconds
apart somebody is shown, or missed, for that long.
"""

import asyncio
import contextlib
import datetime
import hashlib
import logging
import time

import msgspec

from coslice.store.base import StoreError
from coslice.store.election import Seat
from coslice.store.kube_api import LEASES, Json, KubeApi, Missing, Stale

log = logging.getLogger(__name__)

LABEL, SEAT = "coslice-candidate", "coslice/seat"
EVERY_S, LIVES_S = 5.0, 15.0
LEFT_S = 600.0
"""Silent for so long, a Lease was left by a candidate that was killed, and is removed."""


class Candidates:
    def __init__(self, api: KubeApi, seat: Seat) -> None:
        """``seat``: our own; without an address we only look."""
        self._api, self._seat = api, seat
        mark = hashlib.sha256(f"{seat.address} {seat.id}".encode()).hexdigest()[:10]
        self._name = f"{api.location.prefix}-candidate-{mark}"
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Say that we are here. Idempotent."""
        if self._task is None and self._seat.address:
            self._task = asyncio.create_task(self._say_so(), name="kubernetes candidate")

    async def living(self) -> list[Seat]:
        """Raises ``StoreError``."""
        now, seats = time.time(), []
        for lease in await self._all():
            if now - _renewed(lease) < LIVES_S:
                with contextlib.suppress(msgspec.MsgspecError, KeyError):
                    seats.append(msgspec.json.decode(lease["metadata"]["annotations"][SEAT], type=Seat))
        return seats

    async def clear(self) -> None:
        """Remove what candidates that were killed have left."""
        with contextlib.suppress(StoreError):  # the next leader tries again
            for lease in await self._all():
                if time.time() - _renewed(lease) > LEFT_S:
                    meta = lease["metadata"]
                    await self._api.delete(LEASES, meta["name"], meta["resourceVersion"])

    async def close(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with contextlib.suppress(StoreError):  # then it is shown until its time is over
            there = await self._api.get(LEASES, self._name, timeout=1.0)
            await self._api.delete(LEASES, self._name, there["metadata"]["resourceVersion"])

    async def _all(self) -> list[Json]:
        found = await self._api.list(LEASES, labelSelector=f"{LABEL}={self._api.location.prefix}")
        items: list[Json] = found["items"]
        return items

    async def _say_so(self) -> None:
        while True:
            try:
                await self._renew()
            except StoreError as error:
                log.info("other orchestrators cannot be told that this one is here: %s", error)
            await asyncio.sleep(EVERY_S)  # the pace of renewals

    async def _renew(self) -> None:
        meta: Json = {
            "name": self._name,
            "labels": {LABEL: self._api.location.prefix},
            "annotations": {SEAT: msgspec.json.encode(self._seat).decode()},
        }
        now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Json = {"leaseDurationSeconds": int(LIVES_S), "renewTime": now}
        lease: Json = {
            "apiVersion": LEASES.removeprefix("apis/"),
            "kind": "Lease",
            "metadata": meta,
            "spec": spec,
        }
        with contextlib.suppress(Stale):  # somebody else touched it: next time
            try:
                there = await self._api.get(LEASES, self._name)
                meta["resourceVersion"] = there["metadata"]["resourceVersion"]
                await self._api.replace(LEASES, lease)
            except Missing:
                await self._api.create(LEASES, lease)


def _renewed(lease: Json) -> float:
    """Seconds since 1970."""
    try:
        return datetime.datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0
