"""The channel against an agent: every command answered, whatever happens to callbacks, streams and agents."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workload.fake_agent import PATIENCE, FakeAgent
from workload.nets import Training, digests

from coslice.errors import ConfigError, JobRunning, StateOffloaded
from coslice.gate import GATE
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.workload import Handle, register


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as running:
        yield running


@pytest.fixture
def join() -> Iterator[Callable[..., Handle]]:
    """``register`` as ``coslice run`` would have it; closed afterwards."""
    handles: list[Handle] = []

    def call(agent: FakeAgent, *args: Any, **kwargs: Any) -> Handle:
        env = {
            "COSLICE_AGENT": agent.address,
            "COSLICE_JOB": "job-a",
            "COSLICE_GROUP": "trainers,samplers",
            "COSLICE_INCARNATION": "token",
            "RANK": "3",
            "COSLICE_NEED": "123",
        }
        handles.append(register(*args, env=env, **kwargs))
        return handles[-1]

    yield call
    for handle in handles:
        if handle.parked:
            handle._group.state.move_in()
        handle.close()
    assert not GATE.closed


def run_of_one_step() -> Training:
    run = Training("adamw-fused")
    run.step()
    return run


def test_registration_says_who_and_how_much(agent: FakeAgent, join: Any) -> None:
    run = run_of_one_step()
    handle = join(agent, run.net, run.optimizer)
    said = agent.stream().register
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert (said.job, said.incarnation, said.group, said.rank) == ("job-a", "token", "trainers", 3)
    assert (said.pid, said.start_time) == (os.getpid(), int(stat[19]))
    assert (said.state_bytes, said.need_bytes) == (handle.state_bytes, 123)
    assert (said.parked, list(said.modes), said.device) == (False, ["offload", "parts"], "host")
    assert handle.error is None


def test_state_moves_out_and_in_on_command(agent: FakeAgent, join: Any) -> None:
    plain, moved = run_of_one_step(), run_of_one_step()
    handle = join(agent, moved.net, moved.optimizer)
    stream = agent.stream()
    for turn in range(3):
        before = digests(moved.net, moved.optimizer)
        answer = stream.move_out(f"g/{turn}/n/out").moved
        assert (answer.op, answer.bytes) == (f"g/{turn}/n/out", handle.state_bytes)
        assert handle.parked
        with pytest.raises(StateOffloaded):
            moved.net.scale + 1
        assert stream.move_in(f"g/{turn}/n/in").moved.bytes == handle.state_bytes
        assert digests(moved.net, moved.optimizer) == before
        moved._data.manual_seed(turn), plain._data.manual_seed(turn)
        assert plain.step() == moved.step()
    assert os.fstat(agent.files[os.getpid()]).st_size >= handle.state_bytes


def test_a_command_that_is_repeated_is_answered_again_and_done_once(agent: FakeAgent, join: Any) -> None:
    calls: list[str] = []
    join(agent, on_snapshot=lambda: calls.append("out"), on_restore=lambda: calls.append("in"))
    stream = agent.stream()
    assert stream.move_out("op-1/out") == stream.move_out("op-1/out")
    assert stream.move_in("op-1/in") == stream.move_in("op-1/in")
    assert calls == ["out", "in"]
    assert stream.move_out("op-1/out").moved.op == "op-1/out"  # a new try, after a move back
    stream.move_in("op-1/in")
    assert calls == ["out", "in", "out", "in"]


def test_the_size_is_told_at_the_end_of_a_section_and_before_an_answer(agent: FakeAgent, join: Any) -> None:
    run = Training("adamw-fused")
    handle = join(agent, run.net, run.optimizer)
    stream = agent.stream()
    at_first = stream.register.state_bytes
    section = GATE.enter()
    run.step()
    GATE.leave(section)
    told = stream.heard.get(timeout=PATIENCE).resized
    assert (told.state_bytes, told.need_bytes) == (handle.state_bytes, 123)
    assert told.state_bytes > at_first
    run.optimizer.zero_grad()
    assert stream.move_out("op/out").moved.bytes == handle.state_bytes
    assert [resized.state_bytes for resized in stream.resized] == [handle.state_bytes]
    stream.move_in("op/in")


def test_inside_a_section_the_answer_is_busy_and_outside_it_is_moved(agent: FakeAgent, join: Any) -> None:
    join(agent, nn.Linear(8, 8))
    stream = agent.stream()
    section = GATE.enter()
    answer = stream.move_out("op/out", wait=0.05)
    assert (answer.move_failed.code, answer.move_failed.op) == (pb.BUSY, "op/out")
    GATE.leave(section)
    assert stream.move_out("op/out").moved.op == "op/out"
    stream.move_in("op/in")


def test_a_move_waits_for_the_section_to_end(agent: FakeAgent, join: Any) -> None:
    """Even one whose end has state to tell of: the two must not wait for each other."""
    run = Training("adamw-fused")
    handle = join(agent, run.net, run.optimizer)
    stream = agent.stream()
    section = GATE.enter()
    stream.commands.put(pb.WorkloadCommand(move_out=pb.MoveOut(op="op/out", deadline_s=PATIENCE)))
    run.step()
    GATE.leave(section)
    answer = stream.answer().moved
    assert answer.bytes == handle.state_bytes
    stream.move_in("op/in")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError])
def test_whatever_a_callback_raises_is_a_failed_move_and_the_channel_lives(
    error: type[BaseException], agent: FakeAgent, join: Any
) -> None:
    raising = [error]

    def callback() -> None:
        if raising:
            raise raising[0]

    model = nn.Linear(8, 8)
    before = digests(model)
    join(agent, model, on_snapshot=callback, on_restore=callback)
    stream = agent.stream()
    failed = stream.move_out("op/out").move_failed
    assert failed.code == pb.FAILED
    assert f"on_snapshot raised {error.__name__}" in failed.message
    raising.clear()
    assert stream.move_out("op/out").HasField("moved")
    raising.append(error)
    assert "on_restore raised" in stream.move_in("op/in").move_failed.message
    raising.clear()
    assert stream.move_in("op/in").HasField("moved")
    assert digests(model) == before


def test_no_room_is_answered_before_anything_is_touched(agent: FakeAgent, join: Any) -> None:
    agent.budget = 10
    model = nn.Linear(8, 8)
    handle = join(agent, model)
    failed = agent.stream().move_out("op/out").move_failed
    assert (failed.code, "budget of 10 bytes" in failed.message) == (pb.NO_ROOM, True)
    assert not handle.parked
    model(torch.ones(1, 8))


def test_regions_and_modes_come_over_the_wire(agent: FakeAgent, join: Any) -> None:
    run = run_of_one_step()
    handle = join(agent, run.net, run.optimizer)
    stream = agent.stream()
    assert 0 < stream.move_out("op/out", tags=("optimizer",)).moved.bytes < handle.state_bytes
    stream.move_in("op/in")
    refused = stream.move_out("op-2/out", mode="discard").move_failed
    assert (refused.code, "on_restore" in refused.message) == (pb.INVALID, True)


def test_a_lost_stream_is_opened_again_and_says_that_the_state_is_parked(agent: FakeAgent, join: Any) -> None:
    model = nn.Linear(64, 64)
    before = digests(model)
    handle = join(agent, model)
    first = agent.stream()
    answer = first.move_out("op/out")
    agent.hang_up()
    second = agent.stream()
    assert (second.register.parked, second.register.parked_bytes) == (True, handle.state_bytes)
    assert second.register.state_bytes == handle.state_bytes
    assert second.move_out("op/out") == answer  # it had not heard the first one
    assert second.move_in("op/in").moved.bytes == handle.state_bytes
    assert digests(model) == before


def test_a_restarted_agent_gets_the_buffer_and_the_state_comes_back(tmp_path: Path, join: Any) -> None:
    run = run_of_one_step()
    before = digests(run.net, run.optimizer)
    with FakeAgent(tmp_path) as old:
        handle = join(old, run.net, run.optimizer)
        old.stream().move_out("op/out")
        buffer = os.fstat(old.files[os.getpid()])
        port = old.port
    with FakeAgent(tmp_path, port=port) as new:
        stream = new.stream()
        assert stream.register.parked
        assert new.given_back.get(timeout=PATIENCE) == os.getpid()
        assert os.fstat(new.files[os.getpid()]).st_ino == buffer.st_ino
        assert handle.parked
        assert stream.move_in("op-2/in").HasField("moved")
        assert digests(run.net, run.optimizer) == before
        assert stream.move_out("op-3/out").HasField("moved")
        assert os.fstat(new.files[os.getpid()]).st_ino == buffer.st_ino
        stream.move_in("op-3/in")


def test_another_file_from_the_agent_takes_over_what_is_parked(agent: FakeAgent, join: Any) -> None:
    run = run_of_one_step()
    before = digests(run.net, run.optimizer)
    join(agent, run.net, run.optimizer)
    stream = agent.stream()
    stream.move_out("op/out", tags=("weights",))
    os.close(agent.files.pop(os.getpid()))
    stream.move_out("op-2/out")
    assert stream.move_in("op-2/in").HasField("moved")
    assert digests(run.net, run.optimizer) == before


def test_a_refusal_is_logged_once_kept_as_error_and_tried_again(
    agent: FakeAgent, join: Any, caplog: pytest.LogCaptureFixture
) -> None:
    agent.refuse = pb.RegisterRefused(code=pb.JOB_RUNNING, message="job-a runs as pid 1: end it first")
    with caplog.at_level(logging.WARNING, "coslice"):
        handle = join(agent, nn.Linear(4, 4))
        assert isinstance(handle.error, JobRunning)
        assert "job-a runs as pid 1" in str(handle.error)
        agent.refuse = None
        agent.stream()
    assert sum("job-a runs as pid 1" in record.message for record in caplog.records) == 1


def test_an_agent_that_comes_later_is_found(
    tmp_path: Path, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.workload.handle.ANSWER_SECONDS", 0.05)
    with FakeAgent(tmp_path) as first:
        port = first.port
    absent = first
    handle = join(absent, nn.Linear(4, 4))
    assert handle.error is None
    with FakeAgent(tmp_path, port=port) as agent:
        assert agent.stream().move_out("op/out").HasField("moved")
        handle._group.state.move_in()


def test_local_moves_are_refused_where_an_agent_decides(agent: FakeAgent, join: Any) -> None:
    handle = join(agent, nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="acquire"):
        handle.offload()
    with pytest.raises(ConfigError, match="acquire"):
        handle.restore()


def test_two_groups_have_two_channels_and_state_of_their_own(agent: FakeAgent, join: Any) -> None:
    trainer = join(agent, nn.Linear(8, 8))
    sampler = join(agent, nn.Linear(16, 16), group="samplers")
    streams = {stream.register.group: stream for stream in (agent.stream(), agent.stream())}
    assert streams["samplers"].register.state_bytes == sampler.state_bytes == (256 + 16) * 4
    streams["trainers"].move_out("op/out")
    assert (trainer.parked, sampler.parked) == (True, False)
    section = GATE.enter(["samplers"])
    GATE.leave(section)
    streams["trainers"].move_in("op/in")


def test_further_registrations_of_a_group_share_its_channel(agent: FakeAgent, join: Any) -> None:
    first = join(agent, nn.Linear(8, 8))
    stream = agent.stream()
    second = join(agent, nn.Linear(8, 8), need=1000)
    told = stream.heard.get(timeout=PATIENCE).resized
    assert (told.state_bytes, told.need_bytes) == (first.state_bytes + second.state_bytes, 1000)
    second.close()
    assert stream.heard.get(timeout=PATIENCE).resized.state_bytes == first.state_bytes
    with pytest.raises(ConfigError, match="another group"):
        join(agent, nn.Linear(8, 8), job="job-b")


def test_closing_ends_the_stream_and_the_threads(agent: FakeAgent, join: Any) -> None:
    others = set(threading.enumerate())
    handle = join(agent, nn.Linear(8, 8))
    stream = agent.stream()
    begun = {t for t in threading.enumerate() if t.name == "coslice-channel"} - others
    assert begun
    handle.close()
    assert stream.over.wait(PATIENCE)
    for thread in begun:
        thread.join(PATIENCE)
        assert not thread.is_alive()
