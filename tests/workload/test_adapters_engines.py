"""Engines inside the process: vLLM, SGLang and torch_memory_saver, by fakes with the documented signatures.

The fakes hold real memory and fail as the real ones do: a second sleep is a silent no-op or the end of the
process, success frees nothing, weights come back as garbage.
"""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coslice.errors import ConfigError, NoRoom, OperationFailed, StateLost
from coslice.gate import GATE
from coslice.testing.engines.server import Region
from coslice.workload import register
from coslice.workload.adapters import engine as adapters
from coslice.workload.adapters.memory_saver import MemorySaver

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests() -> None:
    gc.collect()  # regions of their engines, which would become free while one goes to sleep


class FakeLLM:
    """As vLLM's ``LLM``: what it answers depends on every page of its weights."""

    def __init__(self, *, enable_sleep_mode: bool = True) -> None:
        self.weights, self.kv = Region(16 * MIB, 3), Region(8 * MIB, 9)
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=enable_sleep_mode))
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self.calls: list[str] = []
        self.faults: set[str] = set()
        self.asleep = False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level}")
        if self.asleep:
            return
        self.asleep = True
        if "frees-nothing" not in self.faults:
            self.weights.release(keep=level == 1)
            self.kv.release(keep=False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up {tags}")
        if "wake-fails" in self.faults:
            raise RuntimeError("CUDA Error: out of memory")
        if self.asleep and "wake-noop" not in self.faults:
            self.asleep = False
            self.weights.resume(garbage=5 if "gibberish" in self.faults else None)
            self.kv.resume()

    def is_sleeping(self) -> bool:
        return self.asleep

    def collective_rpc(self, method: str) -> list[None]:
        self.calls.append(method)
        self.weights.fill(self.weights.seed)
        return [None]

    def reset_prefix_cache(self) -> bool:
        return True

    def words(self) -> int:
        assert not self.asleep
        return self.weights.digest()


class FakeEngine:
    """As SGLang's ``Engine``: what does not fit what is released ends the scheduler."""

    def __init__(self, *, saver: bool = True, backup: bool = True) -> None:
        self.weights, self.kv = Region(16 * MIB, 3), Region(8 * MIB, 9)
        self.server_args = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=backup)
        self.released: set[str] = set()
        self.calls: list[str] = []

    def flush_cache(self) -> None:
        assert not self.released

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        wanted = set(tags or ("weights", "kv_cache"))
        self.calls.append(f"release {sorted(wanted)}")
        if wanted & self.released:
            raise SystemExit("the scheduler is dead")
        self.released |= wanted
        for tag in wanted:
            self.region(tag).release(keep=tag == "weights" and self.server_args.enable_weights_cpu_backup)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        wanted = set(tags or ("weights", "kv_cache"))
        self.calls.append(f"resume {sorted(wanted)}")
        if wanted - self.released:
            raise KeyError(wanted - self.released)
        self.released -= wanted
        for tag in wanted:
            self.region(tag).resume()

    def region(self, tag: str) -> Region:
        return self.weights if tag == "weights" else self.kv


def test_vllm_sleeps_and_wakes_once_each_and_is_measured(registered: Any) -> None:
    llm = FakeLLM()
    handle, words = registered(engine=llm, probe=llm.words), llm.words()
    for _ in range(2):
        assert handle.offload() == pytest.approx(SIZE, rel=0.1)
        assert handle.offload() == 0
        assert handle.restore() == pytest.approx(SIZE, rel=0.1)
        handle.restore()
    assert llm.calls == ["sleep 1", "wake_up None"] * 2
    assert llm.words() == words


def test_other_memory_that_becomes_free_meanwhile_is_not_expected_again(registered: Any) -> None:
    llm = FakeLLM()
    handle, other = registered(engine=llm), Region(32 * MIB, 1)
    plain = llm.sleep

    def sleep(level: int = 1) -> None:
        plain(level)
        if other.pages is not None:
            other.release(keep=False)

    llm.sleep = sleep  # type: ignore[assignment,method-assign]
    assert handle.offload() > SIZE + 16 * MIB
    handle.restore()
    assert handle.offload() == pytest.approx(SIZE, rel=0.1)


def test_an_engine_that_frees_nothing_has_not_left_and_is_woken(registered: Any) -> None:
    llm = FakeLLM()
    llm.faults = {"frees-nothing"}
    handle = registered(engine=llm)
    with pytest.raises(OperationFailed, match="sleep mode"):
        handle.offload()
    assert not handle.parked
    assert llm.calls == ["sleep 1", "wake_up None"]
    llm.faults = set()
    assert handle.offload() > 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("wake-fails", "out of memory"),
        ("wake-noop", "still sleeps"),
        ("gibberish", "its weights did not come"),
    ],
)
def test_an_engine_that_does_not_come_back_well_is_lost(fault: str, words: str) -> None:
    llm = FakeLLM()
    handle = register(engine=llm, probe=lambda: llm.weights.digest(), group=fault, env={})
    handle.offload()
    llm.faults = {fault}
    with pytest.raises(StateLost, match=words):
        handle.restore()
    assert handle.parked
    assert llm.calls == ["sleep 1", "wake_up None"]
    GATE.open(fault)  # the state is lost: let the other tests go on


def test_dropped_weights_are_read_again(registered: Any) -> None:
    llm = FakeLLM()
    words = llm.words()
    handle = registered(engine=llm, mode="discard", on_restore=lambda: None)
    handle.offload()
    handle.restore()
    assert llm.calls == ["sleep 2", "wake_up None", "reload_weights"]
    assert llm.words() == words


def test_there_must_be_room_before_an_engine_is_woken(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = FakeLLM()
    handle = registered(engine=llm)
    handle.offload()
    with monkeypatch.context() as patched:
        patched.setattr(adapters, "device_room", lambda: MIB)
        with pytest.raises(NoRoom, match="of the device to wake"):
            handle.restore()
    assert llm.calls == ["sleep 1"]
    handle.restore()


class FakeAsyncLLM(FakeLLM):
    """As vLLM's ``AsyncLLM``: everything is awaited, on the loop that runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()

    def _here(self) -> None:
        assert asyncio.get_running_loop() is self.loop

    async def pause_generation(self, *, mode: str = "abort") -> None:
        self._here()
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self._here()
        self.calls.append("resume")

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        self._here()
        super().sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:  # type: ignore[override]
        self._here()
        super().wake_up(tags)

    async def is_sleeping(self) -> bool:  # type: ignore[override]
        return self.asleep

    async def reset_prefix_cache(self) -> bool:  # type: ignore[override]
        return True


async def test_an_async_engine_is_drained_and_asked_on_its_own_loop() -> None:
    engine = FakeAsyncLLM()
    handle = register(engine=engine, env={})
    assert await asyncio.to_thread(handle.offload) == pytest.approx(SIZE, rel=0.1)
    await asyncio.to_thread(handle.restore)
    assert engine.calls == ["pause wait", "sleep 1", "wake_up None", "resume"]
    handle.close()


def test_an_async_engine_is_registered_on_its_loop() -> None:
    engine = asyncio.run(_make(FakeAsyncLLM))
    with pytest.raises(ConfigError, match="from a coroutine"):
        register(engine=engine, env={})


async def _make(kind: Callable[[], Any]) -> Any:
    return kind()


def test_sglang_moves_by_region_and_never_twice(registered: Any) -> None:
    engine = FakeEngine()
    handle, words = registered(engine=engine, probe=lambda: engine.weights.digest()), engine.weights.digest()
    handle.offload(tags=["kv_cache"])
    assert engine.released == {"kv_cache"}
    handle.restore()
    handle.offload()
    assert engine.released == {"weights", "kv_cache"}
    handle.restore()
    assert engine.calls == [
        "release ['kv_cache']",
        "resume ['kv_cache']",
        "release ['kv_cache', 'weights']",
        "resume ['kv_cache', 'weights']",
    ]
    assert engine.weights.digest() == words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FakeLLM(enable_sleep_mode=False), "enable_sleep_mode=True"),
        (lambda: FakeEngine(saver=False), "enable_memory_saver=True"),
        (lambda: object(), "no engine that can sleep"),
    ],
)
def test_an_engine_that_cannot_sleep_is_refused_with_the_flag(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register(engine=make(), env={})


def test_weights_without_a_backup_are_not_dropped_by_accident(registered: Any) -> None:
    engine = FakeEngine(backup=False)
    handle = registered(engine=engine)
    with pytest.raises(ConfigError, match="enable_weights_cpu_backup"):
        handle.offload()
    assert engine.calls == []
    handle.offload(tags=["kv_cache"])
    handle.restore()


# ── torch_memory_saver ────────────────────────────────────────────────────────

SAVER = textwrap.dedent(
    """
    import os
    from coslice.testing.engines.server import Region
    from coslice.workload import register

    class Saver:  # as torch_memory_saver: what does not fit ends the process without a traceback
        hook_mode = "torch"
        def __init__(self):
            self.regions = {"weights": Region(16 << 20, 3), "kv": Region(8 << 20, 9)}
            self.paused, self.calls = set(), []
        def region(self, tag="default", enable_cpu_backup=False): ...
        def pause(self, tag=None):
            self.calls.append(f"pause {tag}")
            for each in [tag] if tag else list(self.regions):
                if each in self.paused:
                    os._exit(1)
                self.paused.add(each)
                self.regions[each].release(keep=True)
        def resume(self, tag=None):
            self.calls.append(f"resume {tag}")
            for each in [tag] if tag else list(self.regions):
                if each not in self.paused:
                    os._exit(1)
                self.paused.discard(each)
                self.regions[each].resume()

    saver = Saver()
    before = {tag: region.digest() for tag, region in saver.regions.items()}
    handle = register(engine=saver, regions=("weights", "kv"), env={})
    """
)


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAVER + textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_regions_of_a_memory_saver_are_paused_and_resumed_once_each() -> None:
    said = run(
        """
        handle.offload(tags=["kv"]); handle.offload(tags=["kv"]); handle.restore(); handle.restore()
        handle.offload(); handle.offload(); handle.restore(); handle.restore()
        assert before == {tag: region.digest() for tag, region in saver.regions.items()}
        print(saver.calls)
        """
    )
    assert said.strip() == str(
        ["pause kv", "resume kv", "pause weights", "pause kv", "resume kv", "resume weights"]
    )


def saver(**values: Any) -> Any:
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(pause=nothing, resume=nothing, region=nothing, **values)


@pytest.mark.parametrize(
    ("regions", "env", "words"),
    [
        ((), {}, "which regions"),
        (("a", "a"), {}, "named twice"),
        (("a",), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        (("a",), {"PYTORCH_ALLOC_CONF": "a:b, expandable_segments: True"}, "PYTORCH_ALLOC_CONF"),
        (("a",), {}, "there 0 times"),
        (("a",), {"LD_PRELOAD": "/x/torch_memory_saver.so:/y/torch_memory_saver.so"}, "there 2 times"),
    ],
)
def test_what_would_end_the_process_is_refused(
    regions: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MemorySaver(saver(hook_mode="preload"), regions, env)


def test_a_preloaded_saver_is_taken() -> None:
    MemorySaver(saver(hook_mode="preload"), ("a",), {"LD_PRELOAD": "/x/torch_memory_saver_hook.so"})


def test_moves_are_made_by_one_thread(registered: Any) -> None:
    """Engines are not thread-safe: two callers at once are one after the other."""
    llm = FakeLLM()
    handle = registered(engine=llm)
    threads = [threading.Thread(target=handle.offload) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert llm.calls == ["sleep 1"]


def test_an_endpoint_is_registered_alone() -> None:
    with pytest.raises(ConfigError, match="as a whole"):
        register(engine=FakeLLM(), endpoint="http://127.0.0.1:1", env={})
