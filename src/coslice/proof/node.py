"""One imagined node: an agent with its groups, its stream, and whether it runs."""

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.ids import Epoch, GroupId, NodeId
from coslice.proof.served import Served
from coslice.proof.wire import Command, Forget, Hello, Said, Stream


class Node:
    """An agent: its groups, its stream, and whether it runs."""

    __slots__ = ("alive", "born", "fuse", "hung", "name", "served", "stream")

    def __init__(self, name: NodeId, served: dict[GroupId, Served]) -> None:
        self.name, self.served, self.stream = name, served, Stream()
        self.alive, self.hung = True, False
        self.born = 0.0
        """When its clock began."""
        self.fuse = -1
        """It dies when it has carried out so many effects of the next event; -1: not soon."""

    def copy(self) -> "Node":
        new = Node(self.name, {group: served.copy() for group, served in self.served.items()})
        new.stream, new.alive, new.hung = self.stream.copy(), self.alive, self.hung
        new.born, new.fuse = self.born, self.fuse
        return new

    def dial(self) -> None:
        offers = tuple((s.group, Epoch(s.holdings.epoch), s.facts()) for s in self.served.values())
        self.stream.open(Hello(offers))

    def publish(self) -> None:
        """What the groups want to say goes to the stream, if there is one."""
        for served in self.served.values():
            if served.out:
                for said in served.out:
                    self.stream.send(said)
                served.out.clear()

    def take(self, told: Command) -> None:
        if isinstance(told, Forget):
            served = self.served[told.group]
            served.hear(ev.JobForgotten(at=served.at, job=told.job))
            return
        served, command = self.served[told.group], told.command
        event = ev.MakeResidentCommanded(
            at=served.at,
            op=command.op,
            epoch=command.epoch,
            job=command.job,
            need=command.need,
            freeze=command.freeze,
        )
        if not served.hear(event):
            self._refuse(served, command)

    def _refuse(self, served: Served, command: fx.MakeResident) -> None:
        """A command that the machine refuses is answered too, as the agent does: nobody shall wait for it."""
        failed = ev.OpFailed(
            at=0.0,
            op=command.op,
            node=self.name,
            culprit=command.job,
            reason="refused: overtaken",
            facts=served.facts(),
        )
        served.out.append(Said(served.group, failed))

    def crash(self) -> None:
        self.alive, self.hung, self.fuse = False, False, -1
        self.stream.cut()
        for served in self.served.values():
            served.crash()

    def start(self, now: float) -> None:
        self.alive, self.born = True, now
        for served in self.served.values():
            served.at = 0.0
            served.restart()
