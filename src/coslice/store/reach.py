"""Reading and replacing what is at a location, from outside an orchestrator: for backups."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from coslice.errors import ConfigError
from coslice.store import DEFAULT_TTL, Seat, Store, check_http, make_election, make_store, shared
from coslice.store.again import answered
from coslice.store.backup import Values, put_back
from coslice.store.base import NoAnswer, StoreError
from coslice.store.election import Deposed
from coslice.store.etcd_location import parse_etcd
from coslice.store.kube_location import SCHEME as KUBERNETES
from coslice.store.kube_location import parse_kubernetes

ELECTED_S = 12.0
"""To be elected, so that no orchestrator writes while we do. A leader that was killed is given up meanwhile,
unless its ``leader_ttl`` is longer."""
PATIENCE_S = 5.0


async def read(location: str, *, patience: float = PATIENCE_S) -> Values:
    """Everything that counts there. A shared store may be in use meanwhile; a file that is raises
    ``ConfigError``. ``StoreError``: a shared store was silent for ``patience`` seconds."""
    async with _reading(location, patience) as store:
        return {key: value for key, (value, _) in (await store.load()).items()}


async def replace(
    location: str, values: Mapping[str, bytes], *, force: bool, patience: float = PATIENCE_S
) -> int:
    """See ``put_back``. Raises ``ConfigError`` naming the orchestrator that leads there, or has the file;
    ``patience`` as in ``read``, until we are elected; then ``StoreError`` once our lease has run out."""
    seat = Seat("", id=uuid.uuid4().hex[:12])  # without an address: nobody is sent here
    election = make_election(location, seat=seat, ttl=DEFAULT_TTL)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(election.close)
        if shared(location):
            await stack.enter_async_context(_reading(location, patience))  # so that it is known to answer
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
        try:
            return await put_back(store, values, force=force)
        except Deposed as error:
            raise StoreError(
                f"{location} went away in the middle ({error}): it may hold a part of the backup now; "
                "restore it again, with --force, once it answers"
            ) from None


@contextlib.asynccontextmanager
async def _reading(location: str, patience: float) -> AsyncIterator[Store]:
    """A shared one has answered by then."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            store = await _opened(stack, location, patience)
            stack.push_async_callback(store.close)
            yield store
    except NoAnswer as error:
        raise StoreError(
            f"{location} did not answer within {patience:g} s ({error}): is it running, and is the address "
            "right? --timeout SECONDS waits longer"
        ) from None


async def _opened(stack: contextlib.AsyncExitStack, location: str, patience: float) -> Store:
    if not shared(location):
        return make_store(_existing(location.removeprefix("sqlite:")))
    check_http(location.partition(":")[0])
    if location.startswith(f"{KUBERNETES}://"):
        from coslice.store.kube_api import KubeApi
        from coslice.store.kube_election import floor_of
        from coslice.store.kubernetes import KubernetesStore

        place = parse_kubernetes(location)
        kube = KubeApi(place)
        stack.push_async_callback(kube.close)
        floor = await answered(lambda: floor_of(kube, place), None, patience)
        return KubernetesStore(kube, floor=floor, patience=patience)
    from coslice.store.etcd import EtcdStore
    from coslice.store.etcd_api import EtcdApi, encoded

    etcd = EtcdApi(parse_etcd(location))
    stack.push_async_callback(etcd.close)
    one = {"key": encoded(etcd.location.prefix), "count_only": True}
    await answered(lambda: etcd.call("kv/range", one, timeout=2.0), None, patience)
    return EtcdStore(etcd, patience=patience)


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"there is no store {path}: is it the right folder?")
    return Path(path)
