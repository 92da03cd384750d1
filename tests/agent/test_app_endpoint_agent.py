"""A server is a job like any other: it registers its address, and the agent moves it when its turn ends."""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts

from coslice.agent.client import AgentClient, AsyncAgentClient
from coslice.errors import CosliceError


async def server(node: Node, job: str, *flags: str, group: str = GROUP) -> Process:
    assert node.agent is not None
    environment = {"COSLICE_AGENT": node.agent.address, "COSLICE_JOB": job, "COSLICE_GROUP": group}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("engine_job.py")),
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    node.processes.append(Process(process))
    return node.processes[-1]


def ask(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as got:
        return json.load(got)


async def state(url: str) -> Any:
    return await asyncio.to_thread(ask, url, "/_fake")


async def words(url: str) -> Any:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4}
    return (await asyncio.to_thread(ask, url, "/v1/completions", body))["choices"][0]["text"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_leaves_for_another_job_and_comes_back_over_a_restart_of_the_agent(
    kind: str, node: Node
) -> None:
    await node.start()
    url = (await (await server(node, "sampler", "--kind", kind)).until("registered"))["url"]
    before = await words(url)
    await node.orchestrator.make_resident(GROUP, "sampler", 1)
    out = (await node.orchestrator.make_resident(GROUP, "other", 2)).done
    assert out.bytes_out == pytest.approx(32 * MIB, rel=0.1)
    assert contexts(out.residency) == {"sampler": "SAVED"}
    assert (await state(url))["asleep"] == ["kv_cache", "weights"]
    address = node.agent.address
    await node.agent.stop()
    await node.run_again(listen=address)
    back = (await node.orchestrator.make_resident(GROUP, "sampler", 3)).done
    assert back.restored
    assert back.bytes_in == pytest.approx(32 * MIB, rel=0.1)
    assert (await state(url))["asleep"] == []
    assert await words(url) == before


async def test_a_server_without_a_group_is_moved_by_services_that_schedule_themselves(node: Node) -> None:
    await node.start(orchestrator=None)
    url = (await (await server(node, "judge", group="")).until("registered"))["url"]
    async with AsyncAgentClient(node.agent.address) as client:
        done = await client.snapshot_and_wait("judge")
        assert done.bytes == pytest.approx(32 * MIB, rel=0.1)
        again = await client.snapshot_and_wait("judge")
        assert (again.bytes, "already" in again.reason) == (0, True)
        assert (await client.status()).jobs["judge"].state == "saved"
        await client.restore_and_wait("judge")
    assert (await state(url))["asleep"] == []

    def plain() -> None:
        with AgentClient(node.agent.address) as client:
            client.snapshot_and_wait("judge")
            client.restore_and_wait("judge")
            with pytest.raises(CosliceError, match="registers with this agent first"):
                client.snapshot_and_wait("nobody")

    await asyncio.to_thread(plain)
    assert await words(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://169.254.169.254", "its own loopback only"),
        ("http://user:secret@127.0.0.1:8000", "credentials"),
        ("ftp://127.0.0.1:8000", "is not an engine's address"),
    ],
)
async def test_an_address_that_the_agent_may_not_call_is_refused_when_it_registers(
    url: str, message: str, node: Node
) -> None:
    await node.start()
    process = await server(node, "sampler", "--url", url)
    refused = (await process.until("refused"))["message"]
    assert message in refused
    assert "secret" not in refused


async def test_the_engine_ends_with_a_job_that_is_killed(node: Node) -> None:
    settings = {"app_endpoint": {"settle": "0.5"}}
    await node.start(budget=160 * MIB, on_stuck="kill", stuck_grace=0.0, backends=settings)
    job = await server(node, "sampler", "--fault", "frees-nothing")
    url = (await job.until("registered"))["url"]
    await node.orchestrator.make_resident(GROUP, "sampler", 1)
    await node.orchestrator.make_resident(GROUP, "other", 2)
    assert await job.ended() == -9
    async with asyncio.timeout(PATIENCE):
        while await asyncio.to_thread(answers, url):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # an orphan's end notifies nobody


def answers(url: str) -> bool:
    try:
        ask(url, "/_fake")
    except OSError:
        return False
    return True
