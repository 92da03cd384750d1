"""How vLLM and SGLang are spoken to: which routes, in which order, and what their answers do not mean.

A dialect makes one request after another and says truthfully what it was told; whether memory really moved
and whether the engine still works is found out elsewhere. Sources of the routes: the engines' documentation
and HTTP servers; builds differ, so a missing route (404) is a fact to work with, not an error.
"""

import asyncio
import re
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from coslice.agent.backends.app_endpoint_http import Answer, EngineHttp, NoAnswer
from coslice.agent.backends.base import MoveError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
LOOK_AGAIN = 0.1


class Refused(Exception):
    """The engine answered, and not with success. ``again``: it may not have looked at the request at all."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class Dialect(Protocol):
    name: str
    version: str

    async def check(self, tags: Collection[str], *, discard: bool) -> tuple[str, ...]:
        """Can it move this? The tags that it will; raises ``MoveError`` with the flag that is missing."""
        ...

    async def quiet(self, seconds: float) -> None:
        """Let running requests end and hold further ones; raises a busy ``MoveError``, then it serves on."""
        ...

    async def serve_on(self) -> None:
        """Undo ``quiet``; harmless if it was not."""
        ...

    async def sleep(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        """Raises ``Refused`` or ``NoAnswer``. Never to be repeated for tags that sleep."""
        ...

    async def wake(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        """Raises ``Refused`` or ``NoAnswer``. Never to be repeated for tags that are awake."""
        ...

    async def awake(self) -> bool | None:
        """Its own word, once it serves again; None: it has none."""
        ...

    async def alive(self) -> bool:
        """Does its core still answer? Never by a forward pass: it may be asleep."""
        ...

    async def idle(self, *, timeout: float) -> None:
        """Until its core has done what it was asked before. Raises ``NoAnswer``."""
        ...

    async def refresh(self) -> None:
        """Drop caches that refer to memory that is gone."""
        ...


class Vllm:
    name = "vllm"

    def __init__(self, http: EngineHttp, version: str = "") -> None:
        self.http, self.version = http, version

    async def check(self, tags: Collection[str], *, discard: bool) -> tuple[str, ...]:
        answer = await self.http.get("/is_sleeping")
        if answer.missing:
            raise MoveError(
                f"vLLM at {self.http.endpoint.base} has no /is_sleeping route: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment and --enable-sleep-mode, on loopback (these "
                "routes ask nobody for a password)"
            )
        if not answer.ok:
            raise MoveError(f"vLLM at {self.http.endpoint.base}: /is_sleeping answered {answer.word()}")
        if tags and set(tags) != {WEIGHTS, KV_CACHE}:
            raise MoveError(
                f"vLLM sleeps and wakes as a whole (a forward pass after a partial wake crashes it), not "
                f"{', '.join(sorted(tags))}: leave the tags out"
            )
        return (WEIGHTS, KV_CACHE)

    async def quiet(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await _until_idle(self.http, "vllm:num_requests_", seconds)
        left = max(5.0, deadline - time.monotonic())
        try:
            answer = await self.http.post("/pause", params=[("mode", "wait")], timeout=left)
        except NoAnswer as error:
            await self.serve_on()
            raise MoveError(
                f"requests still run in vLLM at {self.http.endpoint.base}: {error}", busy=True
            ) from None
        if answer.missing:  # an old build: nothing holds a request back, so there must be none
            if await _running(self.http, "vllm:num_requests_") is None:
                raise MoveError(
                    f"vLLM {self.version} at {self.http.endpoint.base} has neither /pause nor request counts "
                    "in /metrics, and sleeping under load kills it: use a newer vLLM"
                )
            return
        if answer.status in (400, 422):  # this mode is not for engines in the server's own process
            answer = await self.http.post("/pause", params=[("mode", "keep")])
            if answer.ok and await _running(self.http, "vllm:num_requests_"):
                await self.serve_on()
                raise MoveError(f"requests still run in vLLM at {self.http.endpoint.base}", busy=True)
        _expect(answer, "/pause", self.http)
        if await self._paused() is False:
            raise MoveError(f"vLLM at {self.http.endpoint.base} said it is paused, and is not")

    async def serve_on(self) -> None:
        if await self._paused():
            _accept(await self.http.post("/resume"), "/resume")

    async def _paused(self) -> bool | None:
        """None: an old build that cannot pause."""
        word = (await self.http.get("/is_paused")).json()
        return word.get("is_paused") is True if isinstance(word, dict) and "is_paused" in word else None

    async def sleep(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        level = "2" if discard else "1"
        _accept(await self.http.post("/sleep", params=[("level", level)], timeout=timeout), "/sleep")

    async def wake(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        """All at once: with a tag that does not sleep in the list it wakes nothing and says 200."""
        _accept(await self.http.post("/wake_up", timeout=timeout), "/wake_up")
        if discard:
            body = {"method": "reload_weights"}
            _accept(await self.http.post("/collective_rpc", body=body, timeout=timeout), "reload_weights")

    async def awake(self) -> bool | None:
        word = (await self.http.get("/is_sleeping")).json()
        return None if not isinstance(word, dict) else word.get("is_sleeping") is False

    async def alive(self) -> bool:
        return (await self.http.get("/health")).ok

    async def idle(self, *, timeout: float) -> None:
        """The core answers this between two of its tasks, so after the sleep that we lost sight of."""
        await self.http.get("/is_sleeping", timeout=timeout)

    async def refresh(self) -> None:
        for path in ("/reset_prefix_cache", "/reset_mm_cache"):
            answer = await self.http.post(path, timeout=30.0)
            if not answer.ok and not answer.missing:
                raise Refused(f"{path} answered {answer.word()}")


class Sglang:
    name = "sglang"

    def __init__(self, http: EngineHttp, info: dict[str, object], *, sharing_nodes: str = "") -> None:
        """``sharing_nodes``: NCCL_GRAPH_REGISTER of its processes."""
        self.http, self.version = http, str(info.get("version", ""))
        self._info, self._graphs = info, sharing_nodes

    async def check(self, tags: Collection[str], *, discard: bool) -> tuple[str, ...]:
        where = f"SGLang at {self.http.endpoint.base}"
        if self._info.get("enable_memory_saver") is False:
            raise MoveError(
                f"{where} runs without --enable-memory-saver: it would answer success and free nothing; "
                "start it with that flag"
            )
        wanted = tuple(tag for tag in (WEIGHTS, KV_CACHE) if not tags or tag in tags)
        if other := sorted(set(tags) - {WEIGHTS, KV_CACHE}):
            raise MoveError(
                f"{where}: {', '.join(other)} cannot be moved (CUDA graphs come back at addresses that their "
                "pool does not know): use weights and kv_cache"
            )
        if WEIGHTS in wanted and not discard and self._info.get("enable_weights_cpu_backup") is False:
            raise MoveError(
                f"{where} runs without --enable-weights-cpu-backup: its weights would be dropped; start it "
                "with that flag, or register the job with mode discard if it pushes new weights itself"
            )
        nodes = self._info.get("nnodes")
        if isinstance(nodes, int) and nodes > 1 and self._graphs != "0":
            raise MoveError(
                f"{where} spans {nodes} nodes: graphs that NCCL registered do not survive a release; start "
                "it with NCCL_GRAPH_REGISTER=0 in its environment"
            )
        return wanted

    async def quiet(self, seconds: float) -> None:
        where = f"SGLang at {self.http.endpoint.base}"
        known = await _until_idle(self.http, "sglang:num_", seconds)
        # There is no mode that waits. Nothing runs that we know of; what comes in between is ended rather
        # than met by a release, which would kill the scheduler.
        answer = await self.http.post("/pause_generation", body={"mode": "abort"}, timeout=30.0)
        if answer.missing and known is None:
            raise MoveError(
                f"{where} has neither /pause_generation nor request counts, and releasing memory under load "
                "kills it: use a newer SGLang, or start it with --enable-metrics"
            )
        if not answer.missing:
            _expect(answer, "/pause_generation", self.http)
        if await _running(self.http, "sglang:num_"):
            await self.serve_on()
            raise MoveError(f"requests still run in {where}", busy=True)

    async def serve_on(self) -> None:
        await self.http.post("/continue_generation", body={}, timeout=30.0)

    async def sleep(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        await self._memory("/release_memory_occupation", tags, timeout)

    async def wake(self, tags: Sequence[str], *, discard: bool, timeout: float) -> None:
        await self._memory("/resume_memory_occupation", tags, timeout)

    async def awake(self) -> bool | None:
        return None

    async def alive(self) -> bool:
        """Not by /health: it may generate, which kills a scheduler whose memory is released."""
        return (await self.http.get("/get_load")).ok or (await self.http.get("/get_server_info")).ok

    async def idle(self, *, timeout: float) -> None:
        """The scheduler answers these between two of its tasks."""
        if (await self.http.get("/get_load", timeout=timeout)).missing:
            await self.http.get("/get_server_info", timeout=timeout)

    async def refresh(self) -> None:
        answer = await self.http.post("/flush_cache", timeout=30.0)
        if not answer.ok and not answer.missing:
            raise Refused(f"/flush_cache answered {answer.word()}")

    async def _memory(self, path: str, tags: Sequence[str], timeout: float) -> None:
        _accept(await self.http.post(path, body={"tags": list(tags)}, timeout=timeout), path)


async def detect(http: EngineHttp, engine: str, environ: dict[str, str]) -> Dialect:
    """Which engine answers there (``engine``: what the job says it is); raises ``MoveError``."""
    where = http.endpoint.base
    if engine in ("", "vllm"):
        answer = await http.get("/version")
        if answer.ok and isinstance(found := answer.json(), dict) and "version" in found:
            return Vllm(http, str(found["version"]))
        if engine or (await http.get("/is_sleeping")).ok:
            return Vllm(http)
    for path in ("/get_server_info", "/server_info"):
        answer = await http.get(path)
        if answer.ok and isinstance(info := answer.json(), dict):
            return Sglang(http, info, sharing_nodes=environ.get("NCCL_GRAPH_REGISTER", ""))
    if engine == "sglang":
        return Sglang(http, {})
    raise MoveError(
        f"neither a vLLM nor an SGLang server answers at {where}: name the engine's own address, not that of "
        "a router or proxy in front of it"
    )


async def _until_idle(http: EngineHttp, metric: str, seconds: float) -> int | None:
    """Requests that still run, once there are none; None: it cannot tell. Raises a busy ``MoveError``.

    Polls: neither engine tells when its last request has ended.
    """
    deadline = time.monotonic() + seconds
    while running := await _running(http, metric):
        if time.monotonic() >= deadline:
            raise MoveError(
                f"{running} requests still run at {http.endpoint.base} after {seconds:g} s: end them before "
                "the job yields",
                busy=True,
            )
        await asyncio.sleep(LOOK_AGAIN)
    return running


async def _running(http: EngineHttp, metric: str) -> int | None:
    """Requests that run or wait in the engine; None: this build does not tell."""
    if metric.startswith("sglang"):
        answer = await http.get("/get_load")
        if answer.ok and isinstance(loads := answer.json(), list):
            return sum(int(load.get("num_reqs", 0)) for load in loads if isinstance(load, dict))
    answer = await http.get("/metrics")
    pattern = rf"^{metric}(?:requests_)?(?:running|waiting|queue)(?:_reqs)?(?:{{.*}})?\s+([0-9.eE+]+)\s*$"
    found = re.findall(pattern, answer.text, re.MULTILINE) if answer.ok else []
    return int(sum(float(value) for value in found)) if found else None


def _expect(answer: Answer, path: str, http: EngineHttp) -> None:
    if not answer.ok:
        raise MoveError(f"{path} at {http.endpoint.base} answered {answer.word()}")


def _accept(answer: Answer, path: str) -> None:
    if not answer.ok:
        raise Refused(f"{path} answered {answer.word()}", again=answer.status in (502, 503, 504))
