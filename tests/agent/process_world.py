"""What tests of backends of whole processes share: a node's context, and members without an agent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coslice.agent.backends.base import NodeContext
from coslice.agent.buffers import HostBuffers
from coslice.agent.config import AgentConfig
from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.host import AnonymousMemory
from coslice.agent.members import Member, member_id
from coslice.agent.processes import start_time
from coslice.core.ids import GroupId, Incarnation, JobId, NodeId
from coslice.store import Store


def node_context(
    folder: Path,
    store: Store,
    found: Mapping[str, tuple[bytes, int]],
    *,
    surveyor: Surveyor | None = None,
    **config: Any,
) -> NodeContext:
    values: dict[str, Any] = {
        "node": NodeId("node-0"),
        "state_dir": str(folder / "state"),
        "runtime_dir": str(folder / "run"),
        "host_budget": 1 << 40,
        "move_timeout": 20.0,
    }
    return NodeContext(
        config=AgentConfig(**{**values, **config}),
        buffers=HostBuffers(1 << 40),
        surveyor=surveyor or Surveyor(),
        store=store,
        found=found,
    )


def lone_member(job: str, pid: int, *, backend: str) -> Member:
    started = start_time(pid)
    assert started is not None
    incarnation = Incarnation(f"{job}-1")
    return Member(
        id=member_id(JobId(job), incarnation, pid, started),
        job=JobId(job),
        incarnation=incarnation,
        group=GroupId("train"),
        pid=pid,
        started=started,
        memory=AnonymousMemory(pid),
        device="cuda",
        backend=backend,
    )
