"""One line per decision with its reason, as text or JSON, and never with a secret in it."""

import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from agent.conftest import MIB
from observe.conftest import GROUP, Machine
from orchestrator.world import World

from coslice.core.effects import ReasonCode
from coslice.core.events import MemberGone
from coslice.core.ids import JobId, MemberId
from coslice.errors import ConfigError
from coslice.observe.decisions import FIELDS, JsonLines, level_of, set_up
from coslice.wire.v1 import coslice_pb2 as pb


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


def decided(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(r, FIELDS) for r in caplog.records if r.name == "coslice.decisions"]


async def test_every_decision_is_one_line_in_its_order(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "coslice.decisions")
    await world.start()
    await world.agent()
    first, second = await world.client("job-a"), await world.client("job-b")
    lease = await first.acquire("pool")
    request = await second.ask("pool")
    await first.yielded(lease)
    await second.granted(request)
    told = [fields["reason"] for fields in decided(caplog)]
    assert told.count("queued") == 2
    assert told.index("granted_empty") < told.index("yielded") < told.index("swap_begun")
    lines = (await first.stub.Explain(pb.ExplainRequest(group="pool", last=200))).lines
    for record in caplog.records:
        if record.name == "coslice.decisions":
            text = record.getMessage().removeprefix("pool: ").rpartition(" [")[0]
            assert any(text in line for line in lines), f"`coslice explain` does not know: {text}"


async def test_the_agents_decisions_name_their_node(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coslice.decisions")
    await machine.start(budget=12 * MIB)
    await machine.workload("job-a", size=8 * MIB)
    first, second = await machine.client("job-a"), await machine.client("job-b")
    await first.yielded(await first.acquire(GROUP))
    await second.acquire(GROUP)
    evicted = [fields for fields in decided(caplog) if fields["reason"] == "evict"]
    assert evicted
    assert {fields["node"] for fields in evicted} == {"node-0"}


def test_what_went_wrong_is_a_warning_and_a_quiet_day_says_nothing() -> None:
    ordinary = {ReasonCode.QUEUED, ReasonCode.GRANTED_SWAPPED, ReasonCode.YIELDED, ReasonCode.SWAP_BEGUN}
    wrong = {ReasonCode.JOB_FAULTED, ReasonCode.BLOCKED, ReasonCode.KILLED, ReasonCode.NODE_LOST}
    assert {level_of(code) for code in ordinary} == {logging.INFO}
    assert {level_of(code) for code in wrong} == {logging.WARNING}
    ended = MemberGone(at=0.0, job=JobId("job-a"), member=MemberId("job-a/1"))
    assert level_of(ReasonCode.LOST, ended) == logging.INFO, "a job that ends leaves a state behind"
    assert level_of(ReasonCode.LOST) == logging.WARNING


SECRETS = ("coslice1.eyJhIjoxfQ.c2VjcmV0", "hunter2", "s3cr3t")


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("coslice.test", logging.WARNING, __file__, 1, message, arguments, None)
    setattr(made, FIELDS, fields)
    return made


def test_a_json_line_stays_json_and_holds_no_secret() -> None:
    made = record(
        'call with "quotes" and %s\nto http://user:%s@host/', SECRETS[0], SECRETS[1], reason="token=s3cr3t"
    )
    try:
        raise ValueError(f"Authorization: Bearer {SECRETS[0]} password={SECRETS[1]}")
    except ValueError:
        made.exc_info = sys.exc_info()
    text = JsonLines().format(made)
    line = json.loads(text)
    assert "\n" not in text
    assert not [secret for secret in SECRETS if secret in text]
    assert line["message"].startswith('call with "quotes" and coslice1.***')
    assert "ValueError" in line["error"]
    assert (line["level"], line["logger"]) == ("warning", "coslice.test")


def test_numbers_stay_numbers() -> None:
    assert json.loads(JsonLines().format(record("x", epoch=7)))["epoch"] == 7


@pytest.mark.parametrize(("level", "style"), [("loud", "text"), ("info", "xml")])
def test_what_there_is_not_is_refused(level: str, style: str) -> None:
    with pytest.raises(ConfigError, match="choose"):
        set_up(level, style)
