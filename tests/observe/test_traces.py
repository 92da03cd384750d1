"""One hand-over is one trace: from the caller's acquire through queue, swap and grant to each agent's stages.

Real orchestrator, agent, workload processes and clients; the spans end in memory instead of at a collector.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack

import grpc.aio
import opentelemetry.trace
import pytest
from agent.conftest import MIB
from observe.conftest import GROUP, Machine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from orchestrator.test_admission import says
from orchestrator.world import World

import coslice
from coslice.core.group import new_group
from coslice.core.ids import GroupId, JobId, RequestId
from coslice.errors import ConfigError
from coslice.observe.tracing import Exporting, Tracing
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.orchestrator.observer import Observer
from coslice.orchestrator.traces import Traces
from coslice.testing.fake_agent import failing


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(self.provider)

    def __iter__(self) -> Iterator[ReadableSpan]:
        return iter(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self if span.name == name]

    def tree(self, root: ReadableSpan) -> dict[str, object]:
        """Names below a span, as nested dicts; each name once."""
        children = [s for s in self if s.parent is not None and s.parent.span_id == root.context.span_id]
        names = [child.name for child in children]
        assert len(set(names)) == len(names), names
        return {child.name: self.tree(child) for child in children}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The job's own tracing goes to the same place."""
    made = Spans()
    monkeypatch.setattr(opentelemetry.trace, "get_tracer", made.provider.get_tracer)
    return made


async def test_a_hand_over_is_one_trace_from_the_callers_acquire_to_the_agents_stages(
    machine: Machine, spans: Spans
) -> None:
    await machine.start(budget=12 * MIB, tracing=spans.tracing)
    for job in ("job-a", "job-b"):
        await machine.workload(job, size=8 * MIB)
    clients = [
        coslice.AsyncClient(machine.orchestrator.address, job=job, groups=GROUP) for job in ("job-a", "job-b")
    ]
    for client in (*clients, *clients):
        await client.acquire()
        await client.yield_()
    for client in clients:
        await client.close()
    roots = spans.named("coslice.client.acquire")
    assert len(roots) == 4
    for root in roots:
        assert root.parent is None
    trees = [spans.tree(root) for root in roots]
    swap = {"coslice.node": {"coslice.snapshot": {}, "coslice.restore": {}}}
    whole = {"coslice.acquire": {"coslice.queue": {}, "coslice.swap": swap, "coslice.grant": {}}}
    assert trees[-1] == whole
    members = [s for s in spans if s.context.trace_id == roots[-1].context.trace_id]
    assert len(members) == 8, "nothing else is in that trace"
    by_name = {span.name: span for span in members}
    assert by_name["coslice.snapshot"].attributes["coslice.bytes"] == 8 * MIB
    assert by_name["coslice.snapshot"].attributes["coslice.job"] == "job-a"
    assert by_name["coslice.restore"].attributes["coslice.job"] == "job-b"
    assert by_name["coslice.restore"].attributes["coslice.backend"] == "app_channel"
    assert by_name["coslice.node"].attributes["coslice.node"] == "node-0"
    for parent, child in (
        ("coslice.acquire", "coslice.queue"),
        ("coslice.acquire", "coslice.swap"),
        ("coslice.swap", "coslice.node"),
        ("coslice.node", "coslice.snapshot"),
        ("coslice.node", "coslice.restore"),
    ):
        assert by_name[parent].start_time <= by_name[child].start_time, (parent, child)
        assert by_name[child].end_time <= by_name[parent].end_time, (parent, child)
    order = [by_name[f"coslice.{name}"] for name in ("queue", "snapshot", "restore", "grant")]
    assert [s.name for s in sorted(order, key=lambda s: s.start_time)] == [s.name for s in order]
    assert all(span.status.is_ok or span.status.status_code.name == "UNSET" for span in members)


class Lone:
    """An orchestrator that traces, with fake agents and bare clients."""

    def __init__(self, stack: AsyncExitStack, spans: Spans) -> None:
        self._stack, self.spans, self.world = stack, spans, World(stack)

    async def start(self, *, nodes: int = 1, admission: str = "off", **options: object) -> OrchestratorApp:
        groups = (GroupConfig(id="pool", admission=admission), GroupConfig(id="samplers"))
        config = OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2, groups=groups)
        self.world.app = OrchestratorApp(config, tracing=self.spans.tracing)
        await self.world.app.start()
        self._stack.push_async_callback(self.world.app.stop)
        for number in range(nodes):
            await self.world.agent(node=f"n{number}", groups=("pool", "samplers"), **options)
        return self.world.app


@pytest.fixture
async def lone(spans: Spans) -> "Iterator[Lone]":
    async with AsyncExitStack() as stack:
        yield Lone(stack, spans)


async def test_without_a_trace_of_the_caller_a_request_begins_one(lone: Lone) -> None:
    await lone.start()
    client = await lone.world.client("job-a")
    await client.yielded(await client.acquire("pool"))
    (root,) = lone.spans.named("coslice.acquire")
    assert root.parent is None
    assert set(lone.spans.tree(root)) >= {"coslice.queue", "coslice.grant"}


async def test_every_request_ends_its_spans_however_it_ends(lone: Lone) -> None:
    await lone.start(states={"job-a": 1, "job-b": 1, "job-c": 1}, behaviour=failing(culprit="job-c"))
    holder, patient = await lone.world.client("job-a"), await lone.world.client("job-b")
    lease = await holder.acquire("pool")
    given_up = await patient.ask("pool")
    await patient.send(abandon={"request": given_up, "reason": "changed its mind"})
    vanishing = await lone.world.client("job-d")
    await vanishing.ask("pool")
    await vanishing.goodbye()
    await holder.yielded(lease)
    faulty = await lone.world.client("job-c")
    await faulty.refused(await faulty.ask("pool"))
    ended = [s.attributes["coslice.job"] for s in lone.spans.named("coslice.acquire")]
    failed = {
        s.attributes["coslice.job"]
        for s in lone.spans.named("coslice.acquire")
        if s.status.status_code.name == "ERROR"
    }
    assert sorted(ended) == ["job-a", "job-b", "job-c", "job-d"]
    assert failed == {"job-b", "job-c", "job-d"}
    (swap,) = (s for s in lone.spans.named("coslice.swap") if s.attributes["coslice.job"] == "job-c")
    assert swap.status.status_code.name == "ERROR"
    assert "told to fail" in swap.status.description


async def test_a_request_for_two_groups_is_one_trace(lone: Lone) -> None:
    await lone.start(nodes=2)
    client = await lone.world.client("job-a")
    await client.yielded(await client.acquire("pool", "samplers"))
    requests = lone.spans.named("coslice.acquire")
    assert {span.attributes["coslice.group"] for span in requests} == {"pool", "samplers"}
    assert len({span.context.trace_id for span in lone.spans}) == 1


async def test_a_request_that_waited_at_the_door_is_traced_from_there(lone: Lone) -> None:
    await lone.start(admission="enforce")
    first = await lone.world.client("job-a", profile=says(60.0, 100.0))
    await first.yielded(await first.acquire("pool"))
    judged = await lone.world.client("job-b", profile=says(5.0, 200.0))
    await judged.yielded(await judged.acquire("pool"))
    roots = {span.attributes["coslice.job"]: span for span in lone.spans.named("coslice.acquire")}
    assert roots.keys() == {"job-a", "job-b"}
    assert "coslice.swap" in lone.spans.tree(roots["job-b"])


@pytest.mark.parametrize("parent", ["nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
async def test_a_malformed_parent_is_no_parent_and_harms_nothing(lone: Lone, parent: str) -> None:
    await lone.start()
    client = await lone.world.client("job-a")
    await client.send(acquire={"request": "r1", "groups": ["pool"], "traceparent": parent})
    await client.yielded(await client.granted("r1"))
    (root,) = lone.spans.named("coslice.acquire")
    assert root.parent is None


def test_a_job_that_does_not_trace_never_loads_opentelemetry() -> None:
    code = (
        "import sys, coslice\n"
        "try: coslice.connect(address='127.0.0.1:1', job='a', groups='g', connect_timeout=0.1).acquire()\n"
        "except coslice.OrchestratorUnreachable: pass\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_a_process_began_in_an_earlier_term_is_over_when_it_leads_again(spans: Spans) -> None:
    group, job = GroupId("pool"), JobId("job-a")
    observer = Observer(traces=Traces(spans.tracing))
    observer.opened(new_group(group))
    observer.traces.asked(group, job, RequestId("r1"), "")
    assert not list(spans)
    observer.opened(new_group(group))
    assert {span.name for span in spans} == {"coslice.acquire", "coslice.queue"}
    (ended,) = spans.named("coslice.acquire")
    assert ended.status.description == "the orchestrator began afresh"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://host:4317"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp.*http://127.0.0.1:4317"):
        Exporting(endpoint, service="coslice")


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []

    async def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for each in request.resource_spans:
            names = {a.key: a.value.string_value for a in each.resource.attributes}
            self.got += [(names["service.name"], s.name) for scope in each.scope_spans for s in scope.spans]
        return ExportTraceServiceResponse()


async def test_spans_reach_a_collector_before_the_process_ends() -> None:
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        exporting = Exporting(f"http://127.0.0.1:{port}", service="coslice-orchestrator")
        exporting.begin("coslice.acquire").end()
        await asyncio.to_thread(exporting.close)
    finally:
        await server.stop(0)
    assert collector.got == [("coslice-orchestrator", "coslice.acquire")]


def test_a_collector_that_never_answers_keeps_no_process_from_ending() -> None:
    """However long OpenTelemetry itself goes on: it does, and the process ends all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = (
            "from coslice.observe.tracing import Exporting\n"
            f"exporting = Exporting('http://127.0.0.1:{silent.getsockname()[1]}', service='coslice')\n"
            "exporting.begin('coslice.acquire').end()\n"
            "exporting.close()\n"
            "import sys, threading\n"
            "sys.exit(all(thread.name != 'last-spans' for thread in threading.enumerate()))\n"
        )
        patient = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
        assert subprocess.run([sys.executable, "-c", code], env=patient, timeout=60).returncode == 0
