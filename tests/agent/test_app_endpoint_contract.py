"""The app endpoint keeps the contract of every backend; and its smaller parts, one by one."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent.process_world import lone_member, node_context

from coslice.agent.backends import app_endpoint
from coslice.agent.backends import app_endpoint_engine as engines
from coslice.agent.backends.app_endpoint import AppEndpointBackend
from coslice.agent.backends.app_endpoint_memory import CONTEXT, DeviceMeasure, host_memory, must_leave
from coslice.agent.backends.app_endpoint_probe import Unwell, compare
from coslice.agent.backends.base import Backend, MoveError
from coslice.agent.discovery.survey import Gpu, Holder, Survey
from coslice.agent.endpoints import allowed_endpoint
from coslice.agent.endpoints_ledger import Golden
from coslice.agent.members import Member
from coslice.errors import ConfigError
from coslice.store import make_store
from coslice.testing.backend_contract import BackendContract, Job
from coslice.testing.engines import FakeEngine

MIB, GIB = 1 << 20, 1 << 30


def member_of(job: str, pid: int, url: str) -> Member:
    member = lone_member(job, pid, backend=f"app_endpoint:url={url}")
    member.device = "host"
    return member


class ServerJob:
    def __init__(self, name: str) -> None:
        self.engine = FakeEngine("vllm", weights=120 * MIB, kv=40 * MIB)
        self.words = self.engine.generate()
        self.members: Sequence[Member] = [member_of(name, self.engine.pid, self.engine.url)]

    async def intact(self) -> bool:
        return await asyncio.to_thread(lambda: self.engine.generate() == self.words)

    def device_bytes(self) -> int:
        return host_memory([self.engine.pid])

    async def kill(self) -> None:
        self.engine.stop()


class ServerWorld:
    def __init__(self, folder: Path) -> None:
        self._folder, self.jobs = folder, list[ServerJob]()
        self.backend: Backend = self.make({})

    async def job(self, name: str) -> ServerJob:
        self.jobs.append(await asyncio.to_thread(ServerJob, name))
        return self.jobs[-1]

    async def break_next_snapshot(self, job: Job) -> None:
        assert isinstance(job, ServerJob)
        job.engine.fault("sleep-500")

    def make(self, settings: Mapping[str, object]) -> Backend:
        return app_endpoint.make(node_context(self._folder, make_store(":memory:"), {}), settings)


class TestAppEndpoint(BackendContract):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> AsyncIterator[ServerWorld]:
        made = ServerWorld(tmp_path)
        yield made
        await made.backend.close()
        for job in made.jobs:
            job.engine.stop()


async def test_host_memory_for_the_weights_is_looked_for_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "host_room", lambda pid: MIB)
    backend = AppEndpointBackend()
    with FakeEngine("vllm", weights=8 * MIB, kv=8 * MIB) as engine:
        member = member_of("a", engine.pid, engine.url)
        with pytest.raises(MoveError, match="in host memory while it sleeps") as refused:
            await backend.snapshot([member], op="1")
        assert refused.value.no_room
        assert not any("/pause" in call or "/sleep" in call for call in engine.calls())
        await backend.snapshot([member], op="2", mode="discard")
        await backend.restore([member], op="3")
        assert any("/reset_mm_cache" in call for call in engine.calls())
        assert any("/reset_prefix_cache" in call for call in engine.calls())


async def test_the_processes_of_an_engine_belong_to_the_job_that_is_ended() -> None:
    backend = AppEndpointBackend()
    with FakeEngine("vllm", weights=MIB, kv=MIB) as engine:
        member = member_of("a", os.getpid(), engine.url)
        assert [ref.pid for ref in await backend.retire([member])] == [engine.pid]


# ── addresses ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v0/", "http://localhost:8000/v0"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("https://127.0.0.1", "https://127.0.0.1:443"),
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_addresses_are_read(text: str, base: str) -> None:
    assert allowed_endpoint(text, allow=["10.0.0.7:8000"]).base == base


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://10.0.0.7:8000", "its own loopback only"),
        ("http://10.0.0.8:8001", "its own loopback only"),
        ("http://127.0.0.1.evil.example:8000", "its own loopback only"),
        ("http://user:hunter2@127.0.0.1:8000", "credentials"),
        ("http://127.0.0.1:8000?level=2", "query"),
        ("file:///etc/passwd", "is not an engine's address"),
        ("127.0.0.1:8000", "is not an engine's address"),
        ("http://127.0.0.1:99999", "cannot be read"),
        ("http://[::1", "cannot be read"),
    ],
)
def test_addresses_that_may_not_be_called_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        allowed_endpoint(text, allow=["10.0.0.8:8000"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "which engine"),
        ({"url": " "}, "which engine"),
        ({"url": "http://127.0.0.1:1", "engine": "tgi"}, "not vllm or sglang"),
        ({"url": "http://127.0.0.1:1", "level": "2"}, "not level"),
    ],
)
def test_what_a_job_may_set_is_checked(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AppEndpointBackend().check(settings)


async def test_what_an_operator_sets_is_checked(tmp_path: Path) -> None:
    world = ServerWorld(tmp_path)
    world.make({"allow": "10.0.0.7:8000 [fd00::1]:8000"})
    for settings in ({"allow": "10.0.0.7"}, {"move_timeout": "nan"}, {"late": "-1"}):
        with pytest.raises(ConfigError, match="backend app_endpoint: "):
            world.make(settings)


# ── how much has to leave, and what is the same ───────────────────────────────


@pytest.mark.parametrize(
    ("used", "values", "least"),
    [
        (20 * GIB, {"device": "cuda"}, int(0.9 * 16 * GIB)),  # 6 of 20 GiB, as was seen, are not enough
        (6 * GIB, {"device": "cuda"}, 3 * GIB),
        (80 * GIB, {"device": "cuda", "processes": 4}, int(0.9 * 64 * GIB)),
        (100 * MIB, {}, 50 * MIB),
        (100 * MIB, {"declared": 60 * MIB}, 54 * MIB),
        (100 * MIB, {"last_asleep": 20 * MIB, "declared": 60 * MIB}, 72 * MIB),
    ],
)
def test_how_much_must_leave(used: int, values: dict[str, Any], least: int) -> None:
    given = {"declared": 0, "last_asleep": -1, "device": "host", "processes": 1} | values
    assert must_leave(used, **given) == least
    assert CONTEXT == 4 * GIB


def golden(text: str, **top: float) -> Golden:
    return Golden(model="m", text=text, top=top)


def test_a_near_tie_that_was_decided_the_other_way_is_the_same_model() -> None:
    compare(golden("Paris", Paris=-0.7, Lyon=-0.71), golden("Lyon", Lyon=-0.7, Paris=-0.72))
    compare(golden("Paris"), golden("Paris"))


@pytest.mark.parametrize(
    "after", [golden("zzz", zzz=-0.1), golden("Lyon", Lyon=-0.1, Paris=-3.0), golden("Lyon")]
)
def test_other_words_by_other_odds_are_other_weights(after: Golden) -> None:
    with pytest.raises(Unwell, match="did not come back as they were"):
        compare(golden("Paris", Paris=-0.2, Lyon=-2.0), after)


class Surveyed:
    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    async def survey(self, *, max_age: float = 0.0) -> Survey:
        return self._survey


async def test_gpus_are_measured_by_nvml_and_no_information_is_not_nothing() -> None:
    def gpu(index: int, *holders: Holder) -> Gpu:
        return Gpu(index=index, uuid=f"GPU-{index}", free=(index + 1) * GIB, holders=holders)

    gpus = (gpu(0, Holder(pid=7, bytes=GIB), Holder(pid=9)), gpu(1, Holder(pid=8, bytes=2 * GIB)), gpu(2))
    measure = DeviceMeasure(Surveyed(Survey(gpus=gpus)))  # type: ignore[arg-type]
    assert await measure.used([7, 8]) == 3 * GIB
    assert await measure.used([6]) == 0
    assert await measure.used([9]) is None
    assert await measure.room([7, 8]) == 3 * GIB
    assert await measure.room([6]) is None
    blind = DeviceMeasure(Surveyed(Survey(error="Unknown Error")))  # type: ignore[arg-type]
    assert (await blind.used([7]), await blind.room([7])) == (None, None)
