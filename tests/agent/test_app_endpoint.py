"""Engines behind HTTP go to sleep and come back; every way in which they were seen to pretend is an error.

Each fake has real memory and the silent failures of its namesake. None is ever told twice what it did.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from coslice.agent.backends.app_endpoint import AppEndpointBackend
from coslice.agent.backends.app_endpoint_memory import HostMeasure, host_memory
from coslice.agent.backends.app_endpoint_settings import EngineSettings, Target
from coslice.agent.backends.base import MoveError
from coslice.agent.endpoints_ledger import CODEC, Ledger
from coslice.store.memory import MemoryStore
from coslice.store.slot import Slot
from coslice.testing.engines import FakeEngine
from coslice.workload.listening import started

MIB = 1 << 20
SIZE = 32 * MIB
QUICK = EngineSettings(section_wait=0.5, move_timeout=30.0, settle=0.3, probe_timeout=30.0, late=30.0)
"""For what fails: only requests that go on, and memory that stays, take so long."""
HASTY = replace(QUICK, move_timeout=1.0, late=1.0)
PATIENT = EngineSettings(section_wait=30.0, move_timeout=30.0, settle=30.0, probe_timeout=30.0, late=30.0)
KINDS = ("vllm", "sglang")
SLEEP = {"vllm": "/sleep", "sglang": "/release_memory_occupation"}
WAKE = {"vllm": "/wake_up", "sglang": "/resume_memory_occupation"}
Start = Callable[..., FakeEngine]


class Crowded(HostMeasure):
    async def room(self, pids: Sequence[int]) -> int | None:
        return 10 * MIB


class Blind(HostMeasure):
    async def used(self, pids: Sequence[int]) -> int | None:
        return None


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[FakeEngine] = []

    def call(kind: str, *flags: str, **settings: Any) -> FakeEngine:
        engines.append(FakeEngine(kind, *flags, weights=24 * MIB, kv=8 * MIB, **settings))
        return engines[-1]

    yield call
    for engine in engines:
        engine.stop()


def target(engine: FakeEngine, key: str = "g/a", **values: Any) -> Target:
    at = started(engine.pid)
    assert at is not None
    return Target(**{"key": key, "job": "a", "url": engine.url, "pid": engine.pid, "started": at, **values})


def count(engine: FakeEngine, path: str) -> int:
    return sum(path in call for call in engine.calls())


async def failed(move: Awaitable[object]) -> MoveError:
    with pytest.raises(MoveError) as caught:
        await move
    return caught.value


# ── there and back ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_sleeps_and_wakes_as_it_was(kind: str, start: Start) -> None:
    engine = start(kind)
    backend, words = AppEndpointBackend(settings=PATIENT), engine.generate()
    full = host_memory([engine.pid])
    for cycle in (1, 2):
        out = await backend.snapshot_engines([target(engine)])
        assert out.bytes == pytest.approx(SIZE, rel=0.05)
        assert out.residual == pytest.approx(full - out.bytes, abs=4 * MIB)
        assert host_memory([engine.pid]) < 30 * MIB
        back = await backend.restore_engines([target(engine)])
        assert back.bytes == pytest.approx(SIZE, rel=0.05)
        assert (engine.state()["asleep"], engine.state()["paused"]) == ([], False)
        assert engine.generate() == words
        assert (count(engine, SLEEP[kind]), count(engine, WAKE[kind])) == (cycle, cycle)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_sleeps_is_not_put_to_sleep_again_nor_what_is_awake_woken(kind: str, start: Start) -> None:
    engine, backend = start(kind), AppEndpointBackend(settings=PATIENT)
    assert (await backend.restore_engines([target(engine)])).bytes == 0
    await backend.snapshot_engines([target(engine)])
    assert (await backend.snapshot_engines([target(engine)])).bytes == 0
    await backend.restore_engines([target(engine)])
    await backend.restore_engines([target(engine)])
    assert (count(engine, SLEEP[kind]), count(engine, WAKE[kind])) == (1, 1)


async def test_the_regions_of_an_sglang_engine_leave_one_after_the_other(start: Start) -> None:
    engine, backend = start("sglang"), AppEndpointBackend(settings=PATIENT)
    words = engine.generate()
    first = await backend.snapshot_engines([target(engine)], tags=["kv_cache"])
    assert first.bytes == pytest.approx(8 * MIB, rel=0.2)
    await backend.snapshot_engines([target(engine)])
    calls = [call for call in engine.calls() if "release" in call]
    assert ["kv_cache" in calls[0], "weights" in calls[0]] == [True, False]
    assert ["kv_cache" in calls[1], "weights" in calls[1]] == [False, True]
    assert (await backend.restore_engines([target(engine)])).bytes == pytest.approx(SIZE, rel=0.05)
    assert engine.generate() == words


async def test_two_engines_of_a_job_sleep_together_or_not_at_all(start: Start) -> None:
    good, bad = start("vllm"), start("sglang", faults=["frees-nothing"])
    backend = AppEndpointBackend(settings=QUICK)
    both = [target(good, "g/1"), target(bad, "g/2")]
    error = await failed(backend.snapshot_engines(both))
    assert not error.lost
    assert good.state()["asleep"] == []
    assert good.generate()
    bad.fault()
    # A release that freed nothing was answered 200, so it was taken back as well.
    assert bad.state()["asleep"] == []
    await backend.snapshot_engines(both)
    await backend.restore_engines(both)


async def test_dropped_weights_are_loaded_again_by_the_engine(start: Start) -> None:
    engine, backend = start("vllm"), AppEndpointBackend(settings=PATIENT)
    words = engine.generate()
    await backend.snapshot_engines([target(engine)], mode="discard")
    assert count(engine, "/sleep?level=2") == 1
    await backend.restore_engines([target(engine)])
    assert engine.generate() == words


# ── draining ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_sleeps_while_requests_run(kind: str, start: Start) -> None:
    engine, backend = start(kind), AppEndpointBackend(settings=QUICK)
    engine.hold(2)
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert error.busy
    assert "requests still run" in str(error)
    assert count(engine, SLEEP[kind]) == 0
    engine.hold(0)
    assert not engine.state()["paused"]
    await AppEndpointBackend(backend._ledger, settings=PATIENT).snapshot_engines([target(engine)])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sleep_waits_for_the_last_request_to_end(kind: str, start: Start) -> None:
    engine, backend = start(kind), AppEndpointBackend(settings=PATIENT)
    engine.hold(1)
    move = asyncio.ensure_future(backend.snapshot_engines([target(engine)]))
    async with asyncio.timeout(30):
        while not any("/metrics" in call or "/get_load" in call for call in engine.calls()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # no request of the backend announces itself
    assert count(engine, SLEEP[kind]) == 0
    engine.hold(0)
    await move
    assert not engine.state()["dead"]


@pytest.mark.parametrize(
    ("kind", "flags", "faults", "runs"),
    [
        ("vllm", ("--without", "/pause", "--without", "/is_paused"), (), True),
        ("vllm", (), ("wait-invalid",), True),
        ("sglang", ("--without", "/pause_generation"), (), True),
        ("sglang", ("--without", "/get_load"), (), True),
    ],
)
async def test_builds_without_a_way_to_wait_are_drained_by_their_counts(
    kind: str, flags: tuple[str, ...], faults: tuple[str, ...], runs: bool, start: Start
) -> None:
    engine, backend = start(kind, *flags, faults=faults), AppEndpointBackend(settings=QUICK)
    engine.hold(1)
    assert (await failed(backend.snapshot_engines([target(engine)]))).busy
    engine.hold(0)
    patient = AppEndpointBackend(backend._ledger, settings=PATIENT)
    await patient.snapshot_engines([target(engine)])
    await patient.restore_engines([target(engine)])
    assert engine.generate()


@pytest.mark.parametrize(
    ("kind", "routes"),
    [
        ("vllm", ("/pause", "/is_paused", "/metrics")),
        ("sglang", ("/pause_generation", "/get_load", "/metrics")),
    ],
)
async def test_an_engine_that_can_neither_hold_nor_count_requests_is_refused(
    kind: str, routes: tuple[str, ...], start: Start
) -> None:
    engine = start(kind, *(word for route in routes for word in ("--without", route)))
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert "use a newer" in str(error)
    assert count(engine, SLEEP[kind]) == 0


async def test_a_pause_that_is_none_is_noticed(start: Start) -> None:
    engine = start("vllm", faults=["pause-noop"])
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert "said it is paused, and is not" in str(error)
    assert count(engine, "/sleep") == 0


# ── success that is none, on the way out ──────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["frees-nothing", "frees-little"])
async def test_a_sleep_that_frees_too_little_fails_and_is_taken_back(
    kind: str, fault: str, start: Start
) -> None:
    engine, backend = start(kind, faults=[fault]), AppEndpointBackend(settings=QUICK)
    words = engine.generate()
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert not error.lost
    assert "its memory fell by" in str(error)
    assert engine.generate() == words
    engine.fault()
    await backend.snapshot_engines([target(engine)])


@pytest.mark.parametrize("kind", KINDS)
async def test_memory_that_is_free_only_after_the_answer_is_waited_for(kind: str, start: Start) -> None:
    engine, backend = start(kind, faults=["frees-late"]), AppEndpointBackend(settings=PATIENT)
    done = await backend.snapshot_engines([target(engine)])
    assert done.bytes >= SIZE // 2  # the rest may follow a moment later
    assert engine.state()["asleep"] == ["kv_cache", "weights"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_says_200_and_dies_is_lost(kind: str, start: Start) -> None:
    """All of its memory fell: measuring alone would call that a success."""
    engine, backend = start(kind), AppEndpointBackend(settings=QUICK)
    engine.fault("dies-asleep")
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert error.lost
    assert "restart it" in str(error)
    again = await failed(backend.restore_engines([target(engine)]))
    assert again.lost
    assert count(engine, WAKE[kind]) <= 1


async def test_a_server_error_to_sleep_leaves_the_engine_serving(start: Start) -> None:
    engine, backend = start("vllm", faults=["sleep-500"]), AppEndpointBackend(settings=QUICK)
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert (error.lost, "/sleep answered 500" in str(error)) == (False, True)
    assert engine.generate()
    await backend.snapshot_engines([target(engine)])


async def test_a_process_that_ends_while_it_goes_to_sleep_is_lost(start: Start) -> None:
    engine = start("vllm", faults=["exits-on-sleep"])
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert error.lost


@pytest.mark.parametrize(("way", "path"), [("sleep-slow", "/sleep"), ("wake-slow", "/wake_up")])
async def test_a_move_that_is_slower_than_its_deadline_is_looked_at_and_not_faulted(
    way: str, path: str, start: Start
) -> None:
    engine, ledger = start("vllm"), Ledger()
    words, patient = engine.generate(), AppEndpointBackend(ledger, settings=PATIENT)
    hasty = AppEndpointBackend(ledger, settings=replace(PATIENT, move_timeout=0.5))
    if path == "/wake_up":
        await patient.snapshot_engines([target(engine)])
    engine.fault(way)
    make = hasty.snapshot_engines if path == "/sleep" else hasty.restore_engines
    move = asyncio.ensure_future(make([target(engine)]))
    async with asyncio.timeout(30):  # until its patience is over and it asks whether the engine is busy
        while not (count(engine, path) and "/is_sleeping" in engine.calls()[-1]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    engine.fault()
    await move
    await patient.restore_engines([target(engine)])
    assert engine.generate() == words
    assert (count(engine, "/sleep"), count(engine, "/wake_up")) == (1, 1)


async def test_a_sleep_that_never_answers_fails_within_its_deadline(start: Start) -> None:
    engine = start("sglang", faults=["release-hangs"])
    backend = AppEndpointBackend(settings=HASTY)
    async with asyncio.timeout(30):
        error = await failed(backend.snapshot_engines([target(engine)]))
    assert "did not go to sleep" in str(error)
    assert count(engine, WAKE["sglang"]) == 0  # its memory did not fall: nothing was released
    assert engine.generate()


@pytest.mark.parametrize("fault", ["release-502-done", "release-502-undone"])
async def test_a_502_is_answered_by_looking_and_never_by_a_second_release(fault: str, start: Start) -> None:
    engine, backend = start("sglang", faults=[fault]), AppEndpointBackend(settings=PATIENT)
    words = engine.generate()
    await backend.snapshot_engines([target(engine)])
    assert count(engine, SLEEP["sglang"]) == (1 if fault.endswith("-done") else 2)
    await backend.restore_engines([target(engine)])
    assert engine.generate() == words
    assert not engine.state()["dead"]


# ── success that is none, on the way back ─────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("vllm", "wake-500", "/wake_up answered 500"),
        ("vllm", "wake-noop", "it says that it still sleeps"),
        ("vllm", "wake-exits", "did not wake"),
        ("vllm", "wake-hangs", "did not wake"),
        ("vllm", "gibberish", "its weights did not come back as they were"),
        ("vllm", "completions-hang", "it does not generate"),
        ("sglang", "resume-exits", "did not wake"),
        ("sglang", "resume-hangs", "did not wake"),
        ("sglang", "gibberish", "its weights did not come back as they were"),
        ("sglang", "completions-hang", "it does not generate"),
    ],
)
async def test_an_engine_that_does_not_come_back_well_is_lost_and_left_alone(
    kind: str, fault: str, words: str, start: Start
) -> None:
    engine, backend = start(kind), AppEndpointBackend(settings=PATIENT)
    where = target(engine)
    await backend.snapshot_engines([where])
    engine.fault(fault)
    hangs = HASTY if fault in ("wake-hangs", "resume-hangs") else QUICK
    settings = replace(QUICK, probe_timeout=1.0) if fault == "completions-hang" else hangs
    backend = AppEndpointBackend(backend._ledger, settings=settings)
    error = await failed(backend.restore_engines([where]))
    assert error.lost
    assert words in str(error)
    assert (await failed(backend.restore_engines([where]))).lost
    if not fault.endswith("-exits"):
        assert count(engine, WAKE[kind]) == 1


async def test_an_engine_without_a_backup_of_its_weights_is_refused_unless_the_job_brings_them(
    start: Start,
) -> None:
    engine, backend = start("sglang", "--no-weights-backup"), AppEndpointBackend(settings=QUICK)
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert "--enable-weights-cpu-backup" in str(error)
    await backend.snapshot_engines([target(engine)], mode="discard")
    await backend.restore_engines([target(engine)])


async def test_it_is_not_woken_where_there_is_no_room(start: Start) -> None:
    engine = start("sglang")
    backend = AppEndpointBackend(settings=QUICK, measure={"host": Crowded()})
    await backend.snapshot_engines([target(engine)])
    error = await failed(backend.restore_engines([target(engine)]))
    assert (error.no_room, error.lost) == (True, False)
    assert count(engine, WAKE["sglang"]) == 0
    roomy = AppEndpointBackend(backend._ledger, settings=PATIENT)
    await roomy.restore_engines([target(engine)])


async def test_checksums_of_the_engine_itself_are_compared_where_it_has_them(start: Start) -> None:
    engine = start("vllm")
    backend = AppEndpointBackend(settings=EngineSettings(checksum=True))
    await backend.snapshot_engines([target(engine)])
    await backend.restore_engines([target(engine)])
    asked = [call for call in engine.calls() if "/weight_checker" in call]
    assert ["checksum" in asked[0], "compare" in asked[1], len(asked)] == [True, True, 2]


# ── refused before anything is touched ────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("vllm", ("--no-dev-mode",), "VLLM_SERVER_DEV_MODE=1"),
        ("sglang", ("--no-memory-saver",), "--enable-memory-saver"),
        ("sglang", ("--nnodes", "2"), "NCCL_GRAPH_REGISTER=0"),
    ],
)
async def test_a_missing_flag_is_named(kind: str, flags: tuple[str, ...], words: str, start: Start) -> None:
    engine = start(kind, *flags)
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert words in str(error)
    assert not any(path in call for call in engine.calls() for path in (SLEEP[kind], "/pause"))


@pytest.mark.parametrize(
    ("kind", "tags"), [("vllm", ["weights"]), ("vllm", ["kv_cache"]), ("sglang", ["cuda_graph"])]
)
async def test_parts_that_do_not_come_back_are_not_moved(kind: str, tags: list[str], start: Start) -> None:
    engine = start(kind)
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)], tags=tags))
    assert tags[0] in str(error)
    assert count(engine, SLEEP[kind]) == 0


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
async def test_memory_that_a_memory_saver_cannot_pause_is_seen_in_the_environment(
    name: str, start: Start
) -> None:
    engine = start("sglang", env={name: "expandable_segments:True"})
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert name in str(error)
    assert count(engine, SLEEP["sglang"]) == 0


async def test_a_process_that_does_not_listen_itself_is_not_the_engine(start: Start) -> None:
    """A router in front drops parameters; and the agent is no proxy to other people's servers."""
    engine, other = start("vllm"), start("vllm")
    wrong = target(engine, url=other.url)
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([wrong]))
    assert "does not listen on port" in str(error)
    assert other.calls() == []


async def test_another_server_is_not_mistaken_for_an_engine(start: Start) -> None:
    engine = start("sglang", "--without", "/get_server_info")
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert "neither a vLLM nor an SGLang server" in str(error)


async def test_an_answer_that_points_elsewhere_is_not_followed(start: Start) -> None:
    engine = start("vllm", "--redirect", "/sleep")
    error = await failed(AppEndpointBackend(settings=QUICK).snapshot_engines([target(engine)]))
    assert "/sleep answered 307" in str(error)
    assert engine.generate()


async def test_an_engine_that_is_not_well_is_not_put_to_sleep(start: Start) -> None:
    engine = start("vllm", faults=["completions-hang"])
    backend = AppEndpointBackend(settings=replace(QUICK, probe_timeout=1.0))
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert "is not well before it sleeps" in str(error)
    assert count(engine, "/pause") == count(engine, "/sleep") == 0


async def test_an_engine_may_sleep_only_so_often(start: Start) -> None:
    engine, backend = start("vllm"), AppEndpointBackend(settings=EngineSettings(max_cycles=1))
    await backend.snapshot_engines([target(engine)])
    await backend.restore_engines([target(engine)])
    error = await failed(backend.snapshot_engines([target(engine)]))
    assert "has slept 1 times" in str(error)


async def test_a_device_that_cannot_be_measured_is_refused(start: Start) -> None:
    engine = start("vllm")
    where = target(engine, device="cuda")
    for backend in (AppEndpointBackend(), AppEndpointBackend(measure={"cuda": Blind()})):
        assert "cannot be measured" in str(await failed(backend.snapshot_engines([where])))
    assert count(engine, "/sleep") == 0


# ── over restarts of the agent, and callers that go away ──────────────────────


@pytest.mark.parametrize("kind", KINDS)
async def test_another_agent_wakes_what_the_last_one_put_to_sleep(kind: str, start: Start) -> None:
    store, engine = MemoryStore(), start(kind)
    words = engine.generate()
    for _ in range(2):
        found = (await store.load()).get("endpoints")
        backend = AppEndpointBackend(Ledger(Slot(store, "endpoints", CODEC, found)), settings=PATIENT)
        await backend.snapshot_engines([target(engine)])
    await backend.restore_engines([target(engine)])
    assert engine.generate() == words
    assert (count(engine, SLEEP[kind]), count(engine, WAKE[kind])) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reached", [True, False])
async def test_an_agent_that_died_before_the_answer_looks_at_the_memory(
    kind: str, reached: bool, start: Start
) -> None:
    engine = start(kind)
    words, ledger = engine.generate(), Ledger()
    done = AppEndpointBackend(ledger, settings=PATIENT)
    await done.snapshot_engines([target(engine)])
    entry = ledger.get("g/a")
    if not reached:
        await done.restore_engines([target(engine)])
    changed = {name: getattr(entry, name) for name in entry.__struct_fields__} | {"phase": "leaving"}
    await ledger.put("g/a", type(entry)(**changed))
    backend = AppEndpointBackend(ledger, settings=PATIENT)
    await backend.restore_engines([target(engine)])
    assert engine.generate() == words
    assert (count(engine, WAKE[kind]), engine.state()["dead"]) == (1, False)


async def test_a_caller_that_goes_away_leaves_a_move_that_ends_and_can_be_undone(start: Start) -> None:
    engine, backend = start("vllm", faults=["sleep-slow"]), AppEndpointBackend(settings=PATIENT)
    move = asyncio.ensure_future(backend.snapshot_engines([target(engine)]))
    async with asyncio.timeout(30):
        while not count(engine, "/sleep?"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    move.cancel()
    undone = asyncio.ensure_future(backend.restore_engines([target(engine)]))
    engine.fault()
    await undone
    assert (engine.state()["asleep"], count(engine, "/wake_up")) == ([], 1)
    assert engine.generate()


async def test_what_slept_in_a_process_that_ended_is_forgotten(start: Start) -> None:
    engine, ledger = start("vllm"), Ledger()
    await AppEndpointBackend(ledger, settings=PATIENT).snapshot_engines([target(engine)])
    assert ledger.ended() == ()
    engine.stop()
    assert ledger.ended() == ("g/a",)
