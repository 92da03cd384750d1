"""Reading and replacing what is at a location, from outside an orchestrator: for backups."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from coslice.errors import ConfigError
from coslice.store import DEFAULT_TTL, Seat, Store, make_election, make_store, shared
from coslice.store.backup import Values, put_back
from coslice.store.base import StoreError
from coslice.store.etcd_location import parse_etcd
from coslice.store.kube_location import SCHEME as KUBERNETES
from coslice.store.kube_location import parse_kubernetes

ELECTED_S = 12.0
"""To be elected, so that no orchestrator writes while we do. A leader that was killed is given up meanwhile,
unless its ``leader_ttl`` is longer."""


async def read(location: str) -> Values:
    """Everything that counts there. A shared store may be in use meanwhile; a file that is raises
    ``ConfigError``."""
    async with _reading(location) as store:
        return {key: value for key, (value, _) in (await store.load()).items()}


async def replace(location: str, values: Mapping[str, bytes], *, force: bool) -> int:
    """See ``put_back``. Raises ``ConfigError`` naming the orchestrator that leads there, or has the file."""
    seat = Seat("", id=uuid.uuid4().hex[:12])  # without an address: nobody is sent here
    election = make_election(location, seat=seat, ttl=DEFAULT_TTL)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(election.close)
        try:
            async with asyncio.timeout(ELECTED_S):
                _, store = await election.campaign()
        except TimeoutError:
            leader = election.hearsay.leader
            if leader is None:
                text = f"nobody could be elected at {location} within {ELECTED_S:g} s: does it answer?"
                raise StoreError(text) from None
            raise ConfigError(
                f"the orchestrator at {leader.address or 'an unknown address'} leads at {location}: stop all "
                "orchestrators there first (one that was killed is given up after its --leader-ttl)"
            ) from None
        stack.push_async_callback(store.close)
        return await put_back(store, values, force=force)


@contextlib.asynccontextmanager
async def _reading(location: str) -> AsyncIterator[Store]:
    async with contextlib.AsyncExitStack() as stack:
        store: Store
        if not shared(location):
            store = make_store(_existing(location.removeprefix("sqlite:")))
        elif location.startswith(f"{KUBERNETES}://"):
            from coslice.store.kube_api import KubeApi
            from coslice.store.kube_election import floor_of
            from coslice.store.kubernetes import KubernetesStore

            place = parse_kubernetes(location)
            kube = KubeApi(place)
            stack.push_async_callback(kube.close)
            store = KubernetesStore(kube, floor=await floor_of(kube, place))
        else:
            from coslice.store.etcd import EtcdStore
            from coslice.store.etcd_api import EtcdApi

            etcd = EtcdApi(parse_etcd(location))
            stack.push_async_callback(etcd.close)
            store = EtcdStore(etcd)
        stack.push_async_callback(store.close)
        yield store


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"there is no store {path}: is it the right folder?")
    return Path(path)
