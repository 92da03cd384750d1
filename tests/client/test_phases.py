"""Phase callbacks: roles become groups, whatever order a framework calls them in."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import coslice
from coslice.client.phases import PhaseCallback, PhaseCallbacks
from coslice.testing.recording import RecordingOrchestrator

TRAINER, SAMPLER = "pool-1-train", "pool-2-sample"


@pytest.fixture
def recording() -> Iterator[RecordingOrchestrator]:
    with RecordingOrchestrator(groups=(TRAINER, SAMPLER)) as recording:
        yield recording


@pytest.fixture
def roles(recording: RecordingOrchestrator) -> Iterator[PhaseCallback]:
    env = recording.env("job", COSLICE_TRAINER_GROUP=TRAINER, COSLICE_SAMPLER_GROUP=SAMPLER)
    with PhaseCallback.from_env(env) as callback:
        yield callback


def test_a_step_holds_each_roles_accelerators_in_its_phases(
    roles: PhaseCallback, recording: RecordingOrchestrator
) -> None:
    for phase in ("init", "generate", "train", "weight_sync"):
        roles.on_phase_begin(phase)
        roles.on_phase_end(phase)
    assert recording.turns() == [
        ("acquire", "init", (TRAINER, SAMPLER)),
        ("yield", "", (SAMPLER,)),
        ("yield", "", (TRAINER,)),
        ("acquire", "generate", (SAMPLER,)),
        ("yield", "", (SAMPLER,)),
        ("acquire", "train", (TRAINER,)),
        ("yield", "", (TRAINER,)),
        ("acquire", "weight_sync", (TRAINER, SAMPLER)),
        ("yield", "", (SAMPLER,)),
        ("yield", "", (TRAINER,)),
    ]
    assert recording.problems() == []


def test_begin_and_end_are_idempotent_and_an_end_without_a_begin_is_nothing(
    roles: PhaseCallback, recording: RecordingOrchestrator
) -> None:
    roles.on_phase_end("train")
    roles.on_phase_begin("train")
    roles.on_phase_begin("train")
    roles.on_phase_end("train")
    assert roles.held == ()
    roles.on_phase_end("train")
    assert [turn[0] for turn in recording.turns()] == ["acquire", "yield"]


def test_phases_that_overlap_share_what_they_hold(roles: PhaseCallback) -> None:
    roles.on_phase_begin("train")
    roles.on_phase_begin("save")
    roles.on_phase_end("train")
    assert roles.held == (TRAINER,)
    roles.on_phase_end("save")
    assert roles.held == ()


def test_a_phase_of_no_role_holds_nothing(roles: PhaseCallback, recording: RecordingOrchestrator) -> None:
    roles.on_phase_begin("reward")
    assert roles.held == ()
    roles.on_phase_begin("reward", role="sampler")
    assert roles.held == (SAMPLER,)
    with pytest.raises(coslice.ConfigError, match="no role"):
        roles.on_phase_begin("reward", role="critic")


def test_the_trainers_are_not_taken_inside_a_phase_of_the_sampler(
    roles: PhaseCallback, recording: RecordingOrchestrator
) -> None:
    roles.on_phase_begin("generate")
    with pytest.raises(coslice.LockOrder, match="generate"):
        roles.on_phase_begin("train")
    assert roles.held == (SAMPLER,)
    roles.on_phase_end("generate")
    roles.on_phase_begin("train")
    assert recording.problems() == []


def test_a_batch_that_is_ready_keeps_the_accelerators_until_another_role_needs_the_order(
    recording: RecordingOrchestrator,
) -> None:
    env = recording.env("job", COSLICE_TRAINER_GROUP=TRAINER, COSLICE_SAMPLER_GROUP=SAMPLER)
    asked = list[str]()

    def ready(role: str) -> bool:
        asked.append(role)
        return True

    with PhaseCallback.from_env(env, ready=ready) as callback:
        for _ in range(3):
            callback.on_phase_begin("generate")
            callback.on_phase_end("generate")
        assert callback.held == (SAMPLER,)
        callback.on_phase_begin("train")
        assert callback.held == (TRAINER,)
    assert asked == ["sampler"] * 3
    assert recording.turns() == [
        ("acquire", "generate", (SAMPLER,)),
        ("yield", "", (SAMPLER,)),
        ("acquire", "train", (TRAINER,)),
        ("yield", "", (TRAINER,)),
    ]


def test_one_group_for_both_roles(recording: RecordingOrchestrator) -> None:
    with PhaseCallback.from_env(recording.env("job", "pool")) as callback:
        callback.on_phase_begin("generate")
        callback.on_phase_begin("train")
        callback.on_phase_end("generate")
        assert callback.held == ("pool",)
        callback.on_phase_end("train")
        callback.on_phase_begin("init")
        assert callback.held == ("pool",)
    assert recording.held == {}


def test_upstreams_variables_stand_in_for_ours(recording: RecordingOrchestrator) -> None:
    env = {
        "TIMESLICE_JOB_ID": "job",
        "TIMESLICE_ORCH_ADDR": recording.address,
        "TIMESLICE_TRAINER_GROUP": TRAINER,
        "TIMESLICE_SAMPLER_GROUP": SAMPLER,
    }
    with PhaseCallback.from_env(env) as callback:
        callback.on_phase_begin("weight_sync")
        assert callback.held == (TRAINER, SAMPLER)


def test_a_group_is_needed_where_there_is_an_orchestrator(recording: RecordingOrchestrator) -> None:
    with pytest.raises(coslice.ConfigError, match="COSLICE_TRAINER_GROUP"):
        PhaseCallback.from_env(recording.env("job"))


def test_without_an_orchestrator_nothing_is_imported_and_nothing_happens() -> None:
    program = """
import sys
from coslice.client.phases import PhaseCallback
callback = PhaseCallback.from_env({})
assert not callback.enabled
callback.on_phase_begin("train"); callback.on_phase_end("train"); callback.close()
assert callback.held == ()
loaded = [name for name in ("grpc", "google.protobuf", "asyncio") if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": ""})


def test_without_an_orchestrator_a_phase_costs_one_look_at_one_attribute() -> None:
    callback = PhaseCallback.from_env({})
    for name in [name for name in vars(callback) if name != "enabled"]:
        delattr(callback, name)  # whoever looks at another one fails
    for phase in ("init", "generate", "train", "no such phase"):
        callback.on_phase_begin(phase, "trainer", {"step": 1})
        callback.on_phase_end(phase, "no such role")


def test_a_job_that_crashes_in_a_phase_leaves_nothing_held(recording: RecordingOrchestrator) -> None:
    program = """
from coslice.client.phases import PhaseCallback
PhaseCallback.from_env().on_phase_begin("train")
raise RuntimeError("as training does")
"""
    env = recording.env("job", "pool", PATH="")
    ended = subprocess.run([sys.executable, "-c", program], env=env, stderr=subprocess.DEVNULL, check=False)
    assert ended.returncode == 1
    kinds = [said.kind for said in recording.trace]
    assert kinds[-1] == "goodbye"
    assert recording.held == {}


class Noisy:
    def __init__(self, name: str, log: list[str], *, fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def _say(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if what == self.fails:
            raise ValueError(f"{self.name} {what}")

    def on_phase_begin(self, phase: str, role: str = "", context: Any = None) -> None:
        self._say("begin")

    def on_phase_end(self, phase: str, role: str = "", context: Any = None) -> None:
        self._say("end")

    def close(self) -> None:
        self._say("close")


def test_composed_callbacks_begin_in_order_and_end_in_reverse() -> None:
    log: list[str] = []
    both = PhaseCallbacks(Noisy("a", log), Noisy("b", log))
    both.on_phase_begin("train")
    both.on_phase_end("train")
    both.close()
    assert log == ["a begin", "b begin", "b end", "a end", "b close", "a close"]


def test_when_one_fails_to_begin_those_before_it_end() -> None:
    log: list[str] = []
    both = PhaseCallbacks(Noisy("a", log), Noisy("b", log, fails="begin"), Noisy("c", log))
    with pytest.raises(ValueError, match="b begin"):
        both.on_phase_begin("train")
    assert log == ["a begin", "b begin", "a end"]


def test_when_one_fails_to_end_the_others_end_all_the_same() -> None:
    log: list[str] = []
    both = PhaseCallbacks(Noisy("a", log), Noisy("b", log, fails="end"))
    with pytest.raises(ValueError, match="b end"):
        both.on_phase_end("train")
    assert log == ["b end", "a end"]
