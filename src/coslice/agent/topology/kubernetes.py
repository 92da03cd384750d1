"""Kubernetes as the topology: watches this agent's own node and the pods on it, and tells what labels say.

Two watches, each begun from a list: of one node by name, and of pods with our labels whose ``spec.nodeName``
is this node. While the API does not answer, what was last heard stands: an API that is away has ended
nobody's job. Decides nothing. Needs httpx (``coslice[ha]``).
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec import Struct

from coslice.agent.topology.labels import POD_JOB, View, view
from coslice.core.ids import NodeId
from coslice.errors import ConfigError
from coslice.store.base import StoreError
from coslice.store.kube_api import Expired, Json, KubeApi
from coslice.store.kube_location import KubeLocation

log = logging.getLogger(__name__)

PAUSE_MIN, PAUSE_MAX = 0.1, 10.0
MENTION_S = 60.0


class _Seen(Struct):
    """One watch's objects, by uid."""

    path: str
    query: dict[str, str]
    things: dict[str, Json] = {}
    known: bool = False
    """It was listed once."""
    version: str = ""


class NodeTopology:
    """``heard`` is told each new view, never before both lists were read once."""

    def __init__(
        self, location: KubeLocation, node: NodeId, *, heard: Callable[[View], None], timeout_s: int = 300
    ) -> None:
        """``timeout_s``: after so long a watch is begun again where it ended."""
        self._api, self._told, self._heard, self._node = KubeApi(location), View(), heard, node
        self._first, self._timeout, self._mentioned = True, timeout_s, -MENTION_S
        self._nodes = _Seen("/api/v1/nodes", {"fieldSelector": f"metadata.name={node}"})
        self._pods = _Seen(
            "/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}", "labelSelector": POD_JOB}
        )

    async def run(self) -> None:
        """Raises ``ConfigError`` where there is no cluster to ask."""
        try:
            self._api.check()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(self._nodes))
                tasks.create_task(self._follow(self._pods))
        finally:
            await self._api.close()

    async def _follow(self, seen: _Seen) -> None:
        pause = PAUSE_MIN
        while True:
            try:
                if not seen.version:
                    await self._list(seen)
                pause = PAUSE_MIN
                await self._watch(seen)
            except Expired:
                seen.version = ""  # too much was missed: begin with a list
                continue
            except (StoreError, ConfigError) as error:
                self._mention(str(error))
            # An API server does not tell when it is back; one that ends each watch at once is not pressed.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_MAX)

    async def _list(self, seen: _Seen) -> None:
        things: dict[str, Json] = {}
        query = {**seen.query, "limit": "200"}
        while True:
            page = await self._api.list_at(seen.path, query)
            things |= {item["metadata"]["uid"]: item for item in page["items"]}
            if not (more := page["metadata"].get("continue", "")):
                break
            query["continue"] = more
        seen.things, seen.known, seen.version = things, True, page["metadata"]["resourceVersion"]
        self._tell()

    async def _watch(self, seen: _Seen) -> None:
        query = {**seen.query, "timeoutSeconds": str(self._timeout)}
        events: AsyncGenerator[Json, None] = self._api.watch_at(seen.path, seen.version, query)
        async with aclosing(events):
            async for event in events:
                thing = event["object"]
                seen.version = thing["metadata"]["resourceVersion"]
                if event["type"] in ("ADDED", "MODIFIED"):
                    seen.things[thing["metadata"]["uid"]] = thing
                elif event["type"] == "DELETED":
                    seen.things.pop(thing["metadata"]["uid"], None)
                else:
                    continue  # a bookmark: only the version
                self._tell()

    def _mention(self, why: str) -> None:
        """Once a minute, for both watches together."""
        now = asyncio.get_running_loop().time()
        if now - self._mentioned >= MENTION_S:
            self._mentioned = now
            log.warning("the labels of node %s are not up to date: %s", self._node, why)

    def _tell(self) -> None:
        if not (self._nodes.known and self._pods.known):
            return
        node = next(iter(self._nodes.things.values()), None)
        now = view(node, self._pods.things.values())
        if now != self._told or self._first:
            if node is None:
                log.warning("there is no node %s in the cluster: is --node its name there?", self._node)
            self._told, self._first = now, False
            self._heard(now)
