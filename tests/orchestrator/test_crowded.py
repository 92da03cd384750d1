"""A state that does not leave although it is said to be leaving: as agents and stores of any age say it."""

import msgspec
import pytest

from coslice.agent.convert import context_to_pb
from coslice.core import events as ev
from coslice.core.events import ContextFact, ContextState
from coslice.core.group_state import Group, NodeView
from coslice.core.ids import GroupId, JobId, NodeId
from coslice.orchestrator import convert
from coslice.orchestrator.config import OrchestratorConfig
from coslice.orchestrator.groups import CODEC, taken_up
from coslice.wire.v1 import coslice_pb2 as pb

PROSE = "on the device beside b, without room for all: the next grant makes it"
"""As agents of before the field say it."""


def heard(context: pb.Context) -> ContextFact:
    residency = pb.Residency(group="g", contexts=[pb.Context.FromString(context.SerializeToString())])
    return convert.facts(residency, "host").contexts[0]


@pytest.mark.parametrize("state", list(ContextState))
def test_the_field_goes_over_the_wire_whatever_the_prose_is(state: ContextState) -> None:
    fact = ContextFact(job=JobId("a"), state=state, reason="in other words", crowded=state == "leaving")
    assert heard(context_to_pb(fact)) == fact
    told = convert.node_status(NodeId("n"), True, ev.NodeFacts(contexts=(fact,)))
    assert convert.facts(pb.Residency(contexts=told.contexts), "host").contexts == (fact,)


@pytest.mark.parametrize(
    ("state", "reason", "crowded"),
    [(pb.LEAVING, PROSE, True), (pb.LEAVING, "stuck", False), (pb.SAVED, PROSE, False), (pb.LIVE, "", False)],
)
def test_an_agent_without_the_field_is_understood(state: int, reason: str, crowded: bool) -> None:
    assert heard(pb.Context(job="a", state=state, reason=reason)).crowded is crowded


def test_only_what_is_said_to_be_leaving_is_crowded() -> None:
    assert not heard(pb.Context(job="a", state=pb.SAVED, crowded=True)).crowded


def test_a_group_that_was_saved_without_the_field_is_understood() -> None:
    facts = tuple(
        ContextFact(job=JobId(job), state=ContextState.LEAVING, reason=reason)
        for job, reason in (("a", PROSE), ("c", "on its way out"))
    )
    view = NodeView(node=NodeId("n"), facts=ev.NodeFacts(contexts=facts))
    plain = msgspec.json.decode(CODEC.encode(Group(id=GroupId("g"), views=(view,))))
    for context in plain["state"]["views"][0]["facts"]["contexts"]:
        del context["crowded"]
    back = taken_up(CODEC.decode(msgspec.json.encode(plain)), 0.0, OrchestratorConfig())
    assert [c.crowded for c in back.views[0].facts.contexts] == [True, False]
