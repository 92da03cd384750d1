"""What people are told of an agent that no orchestrator takes."""

import asyncio
import logging

import grpc
import pytest
from agent.fake_orchestrator import FakeOrchestrator

from coslice.agent import link
from coslice.wire.v1 import coslice_pb2 as pb


async def test_of_several_orchestrators_that_do_not_answer_people_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: asyncio.Queue[None] = asyncio.Queue()

    class Watched(link.Link):
        def _mention(self) -> None:
            super()._mention()
            tried.put_nowait(None)

    monkeypatch.setattr(link, "QUIET_S", 0.05)
    monkeypatch.setattr(link, "BACKOFF_MAX", 0.05)
    dialling = asyncio.create_task(
        Watched("127.0.0.1:1,127.0.0.1:2", hello=pb.AgentHello, command=lambda _: None).run()
    )
    try:
        async with asyncio.timeout(60):
            while not caplog.records:
                await tried.get()
            for _ in range(4):
                await tried.get()
    finally:
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
    (told,) = [record for record in caplog.records if record.name == link.__name__]
    assert told.levelno == logging.WARNING
    for address in ("127.0.0.1:1", "127.0.0.1:2"):
        assert f"{address}: nobody answers" in told.getMessage()


class _Refuses(FakeOrchestrator):
    """Its first answers, then welcome."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.answers = list(answers)

    async def Attach(self, request_iterator, context):
        if self.answers:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.answers.pop(0))
        async for command in super().Attach(request_iterator, context):
            yield command


async def test_why_it_is_refused_is_told_once_until_it_is_another_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "BACKOFF_MAX", 0.05)
    orchestrator = _Refuses("n0 is attached already", "n0 is attached already", "no", "no", "no")
    await orchestrator.start()
    dialled = link.Link(orchestrator.address, hello=pb.AgentHello, command=lambda _: None)
    dialling = asyncio.create_task(dialled.run())
    try:
        async with asyncio.timeout(60):
            await dialled.attached.wait()
    finally:
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
        await orchestrator.stop()
    told = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name != "asyncio"  # which tells of slow callbacks
    ]
    assert [line.rpartition(": ")[2] for line in told] == ["n0 is attached already", "no"]
