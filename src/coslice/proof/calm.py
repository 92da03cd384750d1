"""After the storm: nothing fails any more, and everybody who waits must be served within a stated time.

Also what "served" means: granted, or told why not and then, started afresh, granted. At the end all go home,
and nothing may be left of them: no waiter, no lease, no operation.
"""

from coslice.core import events as ev
from coslice.core.effects import RefuseCode
from coslice.core.group import Group, Held, Swapping
from coslice.core.ids import JobId, SessionId
from coslice.proof.client import Client
from coslice.proof.device import Violation
from coslice.proof.joint import World
from coslice.proof.node import Node
from coslice.proof.served import Served

STEPS = 6000
"""More than any world needs; a guard against going round in circles."""


class Calm:
    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: set[SessionId] = set()
        self.tried: dict[SessionId, float] = {}
        """When another start of its job was in the way: it asks again when time has passed."""

    def bound(self) -> float:
        """Seconds in which everybody must be served: what one turn can take at worst, for each of them.

        A turn waits for the grace of the vanished and of lost nodes, and for every attempt at moving out and
        in, each of which may have been under way and hung when the calm began.
        """
        rules, node = self.world.setup.rules, self.world.setup.node_rules
        attempts = node.retries + 1
        moving = attempts * (node.snapshot_timeout + node.restore_timeout + 2 * node.retry_pause * attempts)
        stuck = node.stuck_grace + node.kill_timeout + node.room_wait + rules.stuck_retry
        turn = rules.session_grace + rules.confirm_timeout + moving + stuck
        return rules.node_loss + turn * (len(self.world.clients) + len(self.world.setup.jobs) + 1) * 2

    def serve_all(self) -> None:
        world = self.world
        self._mend()
        until = world.now + self.bound()
        for _ in range(STEPS):
            if self._step():
                continue
            if all(c.session in self.asked and c.ask is None for c in world.clients.values()):
                break
            due = world.next_due()
            if due > until:
                missed = [
                    c.session
                    for c in world.clients.values()
                    if c.ask is not None or c.session not in self.asked
                ]
                raise Violation(f"8: not served, {self.bound():.0f} s after the last fault: {missed}")
            world.advance(max(0.0, due - world.now))
        else:
            raise Violation("8: they go round in circles")
        self._go_home()

    def _mend(self) -> None:
        world = self.world
        world.fuse = -1
        for group in world.setup.groups:
            for drained in world.shell.locks[group].drained:
                world.shell.operator_says(group, ev.NodeUndrained(at=world.shell.at, node=drained.node))
        world.flush()
        for group in world.setup.groups:
            for name in world.setup.nodes:
                if name not in world.shell.locks[group].nodes:
                    world.nodes[name].stream.cut()
        for node in world.nodes.values():
            if not node.alive:
                node.start(world.now)
            node.hung = False
            if node.stream.torn:
                node.stream.cut()
        for client in world.clients.values():
            client.stopped = False
        for job in world.setup.jobs:
            if not world.of_job(job):
                self._restart(job)

    def _restart(self, job: JobId) -> None:
        world = self.world
        for client in world.of_job(job):
            world.die(client)
        for node in world.nodes.values():
            for served in node.served.values():
                for process in served.device.of(job):
                    served.bury(process.pid)
        world.start(job)

    # ── one thing that happens by itself ──

    def _step(self) -> bool:
        world = self.world
        for node in world.nodes.values():
            if not node.stream.live:
                world.attach(node)
            elif node.stream.down:
                world.tell_node(node)
            elif node.stream.back:
                world.hear_node(node)
            elif not any(self._work(node, served) for served in node.served.values()):
                continue
            return True
        for session in world.unnoticed():
            client = world.clients.get(session)
            if client is None or not client.stream.live:
                world.notice_client(session)
                return True
        return any(self._client(client) for client in list(world.clients.values()))

    def _work(self, node: Node, served: Served) -> bool:
        if served.asked is not None:
            inside = self.world.inside(served.group, served.asked.job)
            served.finish("ok", inside=inside)
        elif served.kills:
            self.world.finish_kill(node, served.group)
            return True
        elif served.news:
            served.learn()
        elif unseen := served.unseen():
            self.world.process_returns(node, served, unseen[0])
        else:
            return False
        self.world.after_node(node, served.group)
        return True

    def _client(self, client: Client) -> bool:
        world = self.world
        if not client.stream.live:
            world.dial(client)
        elif client.stream.back:
            world.hear_client(client)
        elif client.stream.down:
            world.tell_client(client)
        elif client.inside:
            world.leave(client)
        elif client.refused not in (None, RefuseCode.JOB_RUNNING):
            self._restart(client.job)
        elif client.ask is None and (client.session not in self.asked or client.refused is not None):
            if client.refused is not None and client.session in self.asked:
                # another start of the job is not given up yet: it asks again when something has changed
                self.asked.discard(client.session)
                self.tried[client.session] = world.now
                client.refused = None
                return False
            if self.tried.get(client.session, -1.0) >= world.now:
                return False
            self.asked.add(client.session)
            world.client_says(client, client.acquire(world.setup.groups))
        else:
            return False
        return True

    def _go_home(self) -> None:
        """Everybody says goodbye; nothing is left."""
        world = self.world
        for client in list(world.clients.values()):
            world.goodbye(client)
        for client in list(world.clients.values()):
            while client.stream.back:
                world.hear_client(client)
        until = world.now + self.bound()
        for _ in range(STEPS):
            if any(self._nodes_only(n) for n in world.nodes.values()):
                continue
            due = world.next_due()
            if not any(s.waiters or isinstance(s.occupancy, Held | Swapping) for s in self._states()):
                break
            if due > until:
                break
            world.advance(max(0.0, due - world.now))
        for group, state in world.shell.locks.items():
            if state.waiters or isinstance(state.occupancy, Held | Swapping):
                raise Violation(f"5: all have left {group}, and it is {state.occupancy}")

    def _states(self) -> list[Group]:
        return list(self.world.shell.locks.values())

    def _nodes_only(self, node: Node) -> bool:
        world = self.world
        if node.stream.down:
            world.tell_node(node)
        elif node.stream.back:
            world.hear_node(node)
        else:
            return any(self._work(node, served) for served in node.served.values())
        return True
