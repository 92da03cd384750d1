"""What people are told of an agent that no orchestrator takes."""

import asyncio
import logging

import pytest

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
