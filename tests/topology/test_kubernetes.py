"""A node that follows labels, on an API server with behaviour: groups and jobs come and go meanwhile."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from agent import test_upstream
from agent.conftest import GROUP, MIB, PATIENCE, Node, contexts
from agent.fake_orchestrator import FakeOrchestrator
from topology.conftest import Labels

from coslice.agent.app import AgentApp
from coslice.agent.backends import resolve
from coslice.agent.backends.base import Capabilities, Defaults, MoveError, Presence, Restored, Snapshotted
from coslice.agent.config import Follow, GroupDevices
from coslice.agent.members import Member
from coslice.agent.processes import start_time
from coslice.agent.topology import pods as pods_module
from coslice.agent.topology.kubernetes import NodeTopology
from coslice.agent.topology.labels import View
from coslice.agent.topology.place import parse_place
from coslice.agent.topology.placing import Placing
from coslice.core.ids import GroupId, NodeId
from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.testing.fake_kubernetes import ApiError
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.workload import channel as of_workloads


class Freezer(Defaults):
    """A backend of whole processes that has nothing to move: its jobs are parked or not, as it was told."""

    def capabilities(self) -> Capabilities:
        return Capabilities(name="freezer", whole_process=True)

    async def snapshot(self, members: Sequence[Member], **_: object) -> Snapshotted:
        self._mark(members, parked=True)
        return Snapshotted(bytes=0, residual=0, seconds=0.0)

    async def restore(self, members: Sequence[Member], **_: object) -> Restored:
        self._mark(members, parked=False)
        return Restored(bytes=0, seconds=0.0)

    async def probe(self, members: Sequence[Member]) -> Presence:
        parked = sum(member.parked for member in members)
        return Presence(live=len(members) - parked, parked=parked, device_bytes=0)

    @staticmethod
    def _mark(members: Sequence[Member], *, parked: bool) -> None:
        for member in members:
            if member.has_ended:
                raise MoveError(f"process {member.pid} has ended", lost=True)
            member.parked = parked


class Cluster(Labels):
    """With a kubelet for the pods of this machine: a pod's container is a process that sleeps."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels.api)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.found: dict[str, dict[int, int]] = {}

    async def start(self, name: str, *, job: str, group: str = GROUP) -> asyncio.subprocess.Process:
        uid = self.pod(name, job=job, group=group)
        sleep = "import time; time.sleep(600)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", sleep)
        self.processes[name] = process
        started = start_time(process.pid)
        assert started is not None
        self.found[uid] = {process.pid: started}
        self.runs(name)  # the kubelet says so once its process is there
        return process

    async def end(self, name: str) -> None:
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
async def cluster(labels: Labels, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster(labels)
    factories = {**resolve.installed(), "freezer": lambda node, settings: Freezer()}
    monkeypatch.setattr(resolve, "installed", lambda: factories)

    def main_processes(pods, **_: object) -> Mapping[str, Mapping[int, int]]:
        return {pod.uid: made.found[pod.uid] for pod in pods if pod.containers and pod.uid in made.found}

    monkeypatch.setattr(pods_module, "main_processes", main_processes)
    yield made
    for name in list(made.processes):
        await made.end(name)


def following(labels: Labels, **settings: object) -> dict[str, object]:
    default = GroupDevices(group=GroupId("default"), device_budget=160 * MIB, cpus=())
    follow = Follow(place=f"kubernetes?api={labels.api.url}", default=default)
    return {"follow": follow, "groups": (), "backend": "freezer", **settings}


async def offered(orchestrator: FakeOrchestrator, *groups: str) -> None:
    """Until the last hello offers exactly these."""
    async with asyncio.timeout(PATIENCE), orchestrator._changed:
        await orchestrator._changed.wait_for(
            lambda: (
                bool(orchestrator.hellos)
                and tuple(sorted(g.group for g in orchestrator.hellos[-1].groups)) == groups
            )
        )


async def holds(orchestrator: FakeOrchestrator, group: str, *jobs: str) -> None:
    """Until the agent says that these jobs are there, and no other."""

    def last() -> tuple[str, ...]:
        said = [g.residency for g in orchestrator.hellos[-1].groups if g.group == group]
        said += [m.residency for m in orchestrator.reports if m.residency.group == group]
        return tuple(sorted(contexts(max(said, key=lambda residency: residency.version)))) if said else ()

    try:
        async with asyncio.timeout(PATIENCE), orchestrator._changed:
            await orchestrator._changed.wait_for(lambda: last() == jobs)
    except TimeoutError:
        raise AssertionError(f"{group} holds {last()}, not {jobs}") from None


# ── the watches ────────────────────────────────────────────────────────────


class Listener:
    """The views that one node's topology tells."""

    def __init__(self, labels: Labels, node: str = "node-0", *, timeout_s: int = 300) -> None:
        self.views: list[View] = []
        self._changed = asyncio.Event()
        place = parse_place(f"kubernetes?api={labels.api.url}")
        topology = NodeTopology(place, NodeId(node), heard=self._heard, timeout_s=timeout_s)
        self._task = asyncio.create_task(topology.run())

    def _heard(self, view: View) -> None:
        self.views.append(view)
        self._changed.set()

    async def until(self, wanted: Callable[[View], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not (self.views and wanted(self.views[-1])):
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> "Listener":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def jobs(*names: str) -> Callable[[View], bool]:
    return lambda view: tuple(sorted(pod.job for pod in view.pods)) == names


def groups(*names: str) -> Callable[[View], bool]:
    return lambda view: view.groups == frozenset(map(GroupId, names))


async def test_a_node_hears_of_itself_and_its_own_pods_only(labels: Labels) -> None:
    labels.node("node-0", "train")
    labels.node("node-1", "other")
    labels.pod("p1", job="a")
    labels.pod("p2", job="b", node="node-1")
    async with Listener(labels) as heard:
        await heard.until(jobs("a"))
        assert groups("train")(heard.views[0])
        labels.pod("p3", job="c")
        labels.label("node-1", "else")
        labels.label("node-0", "train", "sample")
        await heard.until(lambda view: jobs("a", "c")(view) and groups("sample", "train")(view))
        labels.delete("p1")
        await heard.until(jobs("c"))
        assert all(jobs("b")(view) is False for view in heard.views)


async def test_a_gap_in_the_history_is_read_anew(labels: Labels) -> None:
    """410: what happened meanwhile is not in the watch any more."""
    labels.node("node-0", "train")
    labels.pod("p1", job="a")
    async with Listener(labels) as heard:
        await heard.until(jobs("a"))
        labels.api.go_down()
        labels.delete("p1")
        labels.pod("p2", job="b")
        labels.cluster.compact()
        labels.api.down = False
        await heard.until(jobs("b"))


async def test_an_api_that_is_away_ends_nobody(labels: Labels) -> None:
    labels.node("node-0", "train")
    labels.pod("p1", job="a")
    async with Listener(labels) as heard:
        await heard.until(jobs("a"))
        count = len(heard.views)
        broken = ApiError(503, "ServiceUnavailable", "etcd is away")
        labels.api.fail = lambda method, path: broken
        labels.cluster.drop_watches()
        await asyncio.sleep(0.3)  # some attempts fail meanwhile
        assert len(heard.views) == count
        labels.api.fail = lambda method, path: None
        labels.pod("p2", job="b")
        await heard.until(jobs("a", "b"))


async def test_a_watch_that_ends_goes_on_where_it_ended(labels: Labels) -> None:
    labels.node("node-0", "train")
    async with Listener(labels, timeout_s=1) as heard:
        await heard.until(groups("train"))
        for number in range(3):
            labels.pod(f"p{number}", job=f"job-{number}")
            labels.cluster.drop_watches()
        await heard.until(jobs("job-0", "job-1", "job-2"))


@pytest.mark.parametrize("place", ["nomad", "kubernetes?namespace=x", "kubernetes://somewhere"])
def test_a_place_that_cannot_be_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="--topology"):
        parse_place(place)


async def test_where_there_is_no_cluster_it_ends_and_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for place, words in (
        ("kubernetes", "this is no pod of a Kubernetes cluster: .*api=URL"),
        (f"kubernetes?api=https://k:6443&ca={tmp_path}/no.crt", "cannot use .*/no.crt"),
        (f"kubernetes?api=http://127.0.0.1:1&token_file={tmp_path}/no", r"cannot read .*/no, the token"),
    ):
        topology = NodeTopology(parse_place(place), NodeId("node-0"), heard=lambda view: None)
        with pytest.raises(ConfigError, match=words):
            await topology.run()


# ── the agent ──────────────────────────────────────────────────────────────


async def test_groups_come_and_go_with_the_node_s_labels(node: Node, cluster: Cluster) -> None:
    cluster.node("node-0", "train")
    await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    cluster.label("node-0", "sample", "train")
    await offered(node.orchestrator, "sample", "train")
    cluster.label("node-0", "sample")
    await offered(node.orchestrator, "sample")


async def test_a_group_of_a_labelled_node_comes_back_with_its_epoch(node: Node, cluster: Cluster) -> None:
    cluster.node("node-0", "train")
    await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    await node.orchestrator.make_resident("train", "a", 7)
    cluster.label("node-0")
    await offered(node.orchestrator)
    cluster.label("node-0", "train")
    await offered(node.orchestrator, "train")
    assert node.orchestrator.hellos[-1].groups[0].epoch == 7


async def test_a_pod_s_process_is_its_job_s_until_it_ends(node: Node, cluster: Cluster) -> None:
    cluster.node("node-0", "train")
    await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    process = await cluster.start("p1", job="a")
    await holds(node.orchestrator, "train", "a")
    await cluster.end("p1")
    await holds(node.orchestrator, "train")
    last = [m for m in node.orchestrator.reports if m.residency.ended][-1].residency
    assert [(one.job, one.pid) for one in last.ended] == [("a", process.pid)]


async def test_a_pod_that_is_gone_takes_its_job_along(node: Node, cluster: Cluster) -> None:
    """Deleted by force: the API has forgotten it, its process may linger."""
    cluster.node("node-0", "train")
    await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    await cluster.start("p1", job="a")
    await cluster.start("p2", job="b")
    await holds(node.orchestrator, "train", "a", "b")
    cluster.delete("p1")
    await holds(node.orchestrator, "train", "b")


async def test_a_group_with_a_job_is_served_until_the_job_is_gone(node: Node, cluster: Cluster) -> None:
    """Its saved state can only come back on this node."""
    cluster.node("node-0", "train")
    await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    await cluster.start("p1", job="a")
    await holds(node.orchestrator, "train", "a")
    cluster.label("node-0", "other")
    await offered(node.orchestrator, "other", "train")
    await cluster.end("p1")
    await offered(node.orchestrator, "other")


async def test_a_restarted_agent_knows_its_pods_and_forgets_those_that_went(
    node: Node, cluster: Cluster
) -> None:
    cluster.node("node-0", "train")
    agent = await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    await cluster.start("p1", job="a")
    await cluster.start("p2", job="b")
    await holds(node.orchestrator, "train", "a", "b")
    await node.orchestrator.make_resident("train", "b", 1)
    await agent.stop()
    node.orchestrator.reports.clear()  # versions begin anew with the agent
    cluster.delete("p1")
    cluster.api.fail = lambda method, path: ApiError(503, "ServiceUnavailable", "not yet")
    await node.run_again()
    await offered(node.orchestrator, "train")  # before any label could be read
    assert "a" in contexts(node.orchestrator.hellos[-1].groups[0].residency)
    cluster.api.fail = lambda method, path: None
    await holds(node.orchestrator, "train", "b")


async def test_a_process_that_registers_takes_the_place_of_what_labels_said(
    node: Node, cluster: Cluster
) -> None:
    """One start of the job, not two that exclude each other."""
    cluster.node("node-0", "train")
    agent = await node.start(**following(cluster))
    await offered(node.orchestrator, "train")
    await cluster.start("p1", job="a")
    await holds(node.orchestrator, "train", "a")
    workload = await node.workload("a", size=8 * MIB)
    assert [member.pid for member in agent.members] == [workload.pid]
    cluster.pod("p2", job="else")  # any change makes it look again
    await cluster.start("p3", job="c")
    await holds(node.orchestrator, "train", "a", "c")
    assert workload.pid in [member.pid for member in agent.members if member.job == "a"]
    assert len([member for member in agent.members if member.job == "a"]) == 1


async def test_a_backend_that_needs_the_processes_help_places_none(node: Node, cluster: Cluster) -> None:
    cluster.node("node-0", "train")
    agent = await node.start(**following(cluster, backend="app_channel"))
    await offered(node.orchestrator, "train")
    await cluster.start("p1", job="a")
    cluster.label("node-0", "sample", "train")
    await offered(node.orchestrator, "sample", "train")
    assert not list(agent.members)


async def test_a_process_registers_as_the_job_that_its_pod_s_label_names(
    node: Node, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.node("node-0", "train")
    agent = await node.start(**following(cluster, backend="app_channel"))
    await offered(node.orchestrator, "train")
    uid, inside = cluster.pod("p1", job="a"), "no pod"
    async with asyncio.timeout(PATIENCE):
        while not (agent._placing._view and agent._placing._view.pods):  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(0.01)
    monkeypatch.setattr(pods_module, "uid_of", lambda pid: inside)
    await node.workload("b", size=8 * MIB)  # of no pod that has labels
    inside = uid
    await node.workload("a", size=8 * MIB)
    wrong = await (await node.workload("c", size=8 * MIB, wait=False)).until("refused")
    assert wrong["code"] == "DENIED"
    assert "is in pod rl/p1, whose label timeslice.io/job-id says a, and registers as c" in wrong["message"]
    assert sorted(member.job for member in agent.members) == ["a", "b"]


@pytest.mark.parametrize("protocol", ["coslice", "upstream"])
async def test_who_registers_before_labels_are_read_waits_for_them(
    node: Node, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Which groups there are is not known before either."""
    asked, known = asyncio.Event(), Placing.known

    async def waits(placing: Placing) -> bool:
        asked.set()
        return await known(placing)

    monkeypatch.setattr(Placing, "known", waits)
    monkeypatch.setattr("coslice.agent.topology.placing.KNOWN_S", PATIENCE)
    cluster.node("node-0", "train")
    cluster.api.fail = lambda method, path: ApiError(503, "ServiceUnavailable", "not yet")
    agent = await node.start(**following(cluster, backend="app_channel"))
    if protocol == "upstream":
        coming = asyncio.create_task(test_upstream.workload(node, "a", group="train", size=8 * MIB))
    else:
        workload = await node.workload("a", size=8 * MIB, wait=False)
        coming = asyncio.create_task(workload.until("admitted"))
    async with asyncio.timeout(PATIENCE):
        await asked.wait()
    cluster.api.fail = lambda method, path: None
    await coming
    assert [(member.job, member.group) for member in agent.members] == [("a", "train")]


async def test_while_no_label_was_read_nobody_new_is_taken_in_and_nobody_known_is_refused(
    node: Node, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of one job's pod could be another job's otherwise, once the agent has been restarted."""
    cluster.node("node-0", "train")
    first = await node.start(**following(cluster, backend="app_channel"))
    await offered(node.orchestrator, "train")
    member = await node.workload("a", size=8 * MIB)
    await member.until("admitted")
    await first.stop()
    monkeypatch.setattr("coslice.agent.topology.placing.KNOWN_S", 0.2)
    cluster.api.fail = lambda method, path: ApiError(503, "ServiceUnavailable", "away")
    await node.run_again(listen=first.address)
    await member.until("admitted")
    for group in ("train", "other"):
        early = await node.workload("c", size=8 * MIB, wait=False, group=group)
        refused = await early.until("refused")
        assert (refused["code"], "no label" in refused["message"]) == ("FAILED", True)
    cluster.api.fail = lambda method, path: None
    monkeypatch.setattr("coslice.agent.topology.placing.KNOWN_S", PATIENCE)
    await (await node.workload("b", size=8 * MIB)).until("admitted")


async def test_who_comes_before_the_label_of_its_group_is_not_turned_away_for_good(
    node: Node, cluster: Cluster
) -> None:
    """A node may get one while it serves others."""
    cluster.node("node-0", "train")
    await node.start(**following(cluster, backend="app_channel"))
    await offered(node.orchestrator, "train")
    early = await node.workload("a", group="sample", size=8 * MIB, wait=False)
    refused = await early.until("refused")
    assert pb.Code.Value(refused["code"]) not in of_workloads._HOPELESS, "it dials again"
    assert "once its node has the group's label" in refused["message"]


async def test_an_upstream_holder_whose_pod_is_deleted_frees_the_lock(cluster: Cluster) -> None:
    """No session, no yield: only the pod's end can tell. With a real orchestrator and agent."""
    cluster.node("node-0", "train")
    with tempfile.TemporaryDirectory(prefix="coslice-") as folder:
        orchestrator = OrchestratorApp(
            OrchestratorConfig(listen="127.0.0.1:0", store=":memory:", open_groups=True)
        )
        await orchestrator.start()
        node = Node(Path(folder))
        node.orchestrator.address = orchestrator.address
        try:
            agent = await node.start(**following(cluster, orchestrator=orchestrator.address))
            await cluster.start("p1", job="a")
            await cluster.start("p2", job="b")
            await _members(agent, {"a", "b"})
            async with grpc.aio.insecure_channel(orchestrator.address) as channel:
                upstream = TimeSliceOrchestratorServiceStub(channel)
                await _known(upstream, "train")
                await upstream.Acquire(up.AcquireRequest(job_id="a", group_id="train"), timeout=PATIENCE)
                waiting = asyncio.ensure_future(
                    upstream.Acquire(up.AcquireRequest(job_id="b", group_id="train"), timeout=PATIENCE)
                )
                done, _ = await asyncio.wait([waiting], timeout=0.3)
                assert not done
                cluster.delete("p1")
                assert (await waiting).success
        finally:
            await node.stop()
            await orchestrator.stop()


async def _members(agent: AgentApp, wanted: set[str]) -> None:
    async with asyncio.timeout(PATIENCE):
        while {member.job for member in agent.members} != wanted:
            await agent.members.changed()


async def _known(upstream: TimeSliceOrchestratorServiceStub, group: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while group not in (await upstream.ListGroups(up.ListGroupsRequest())).group_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a new group
