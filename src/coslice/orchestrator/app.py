"""The orchestrator as one thing to start and stop: store, journal, drivers, gRPC server.

It serves in terms. With a store of its own there is one, from start to stop. With a shared store a term
begins when this process is elected and ends when it leads no longer; in between it stands by at the same
address.

Signals, processes and output belong to the command line. A driver or task that breaks ends ``wait``; with a
shared store it ends the term, and another leads.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.ids import GroupId
from coslice.core.outcome import Rejected
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.metric import Source
from coslice.observe.tracing import Tracing
from coslice.orchestrator import dashboard, job_meter, metrics
from coslice.orchestrator.admin import Admin
from coslice.orchestrator.admission import Admissions
from coslice.orchestrator.admission_store import AdmissionStore
from coslice.orchestrator.agents import Agents
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig, agents_address, check
from coslice.orchestrator.desk import Desk, Stream
from coslice.orchestrator.groups import Groups
from coslice.orchestrator.live import Live, Term
from coslice.orchestrator.metrics import Pushed
from coslice.orchestrator.observer import Observer
from coslice.orchestrator.outbox import End
from coslice.orchestrator.roster import Roster
from coslice.orchestrator.service import OrchestratorService
from coslice.orchestrator.sessions import Session, Sessions
from coslice.orchestrator.traces import Traces
from coslice.orchestrator.upstream import SERVICE as UPSTREAM
from coslice.orchestrator.upstream import UpstreamService
from coslice.orchestrator.verbs import Verbs
from coslice.orchestrator.watch import Watchers
from coslice.runtime.clock import Clock, LoopClock
from coslice.runtime.heap import Heap
from coslice.runtime.journal import Journal
from coslice.runtime.supervisor import Crashed, Supervisor
from coslice.security import access
from coslice.security.access import Guard
from coslice.security.addresses import split_address
from coslice.security.served import Served
from coslice.store import Election, Seat, Store, Tenure, make_election, shared
from coslice.store.base import StoreError
from coslice.wire.malformed import RefuseMalformed
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import (
    add_TimeSliceOrchestratorServiceServicer_to_server,
)
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
SERVICE = "coslice.v1.Orchestrator"
RULES = {
    f"/{SERVICE}/Session": access.INBAND,
    f"/{SERVICE}/Attach": access.INBAND,
    f"/{SERVICE}/GetStatus": access.ANY,
    f"/{SERVICE}/WatchStatus": access.ANY,
    f"/{SERVICE}/Explain": access.ANY,
}
STREAMS = (
    Stream(f"/{SERVICE}/Session", pb.ClientMessage.FromString, pb.ServerMessage.SerializeToString),
    Stream(f"/{SERVICE}/Attach", pb.AgentMessage.FromString, pb.AgentCommand.SerializeToString),
)
MAX_TEXT = 4096
_STOPPING = End(grpc.StatusCode.UNAVAILABLE, "the orchestrator is stopping; connect again")


class _Shown(NamedTuple):
    """Of the present term."""

    groups: Groups
    sessions: Sessions
    agents: Agents
    journal: Journal
    admission: Admissions
    roster: Roster | None


class OrchestratorApp:
    """``start`` once, ``stop`` once; ``address`` is known in between."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        board: Board | None = None,
        tracing: Tracing | None = None,
        heap: Heap | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``board``: where its metrics and its readiness go; None: nobody asks for them. ``tracing``: where
        spans of hand-overs go; None: nowhere. ``heap``: of a process that is only this; None: Python's way.
        ``clock``: what time is taken from; None: the event loop."""
        self.config, self._clock = config, clock or LoopClock()
        self._board, self._heap = board, heap
        pushed = Pushed(board.registry) if board is not None else None
        self._observer = Observer(pushed, Traces(tracing) if tracing is not None else None, heap)
        self._pushed = pushed
        self.live = Live(self._look, leader=self._leader) if board is not None else None
        """What the dashboard shows."""
        self._watchers: Watchers | None = None
        """Of the present term."""
        self._shown: _Shown | None = None
        """What the metrics are read from; None while this process stands by."""
        if board is not None:
            board.ready["orchestrator"] = lambda: "" if self._ready.is_set() else "it is starting"
            self._add_metrics(board)
        if board is not None and self.live is not None:
            dashboard.add(board, self.live)
        self.instance = ""
        """Changes with every start; clients and agents see it in their welcome."""
        self._address = ""
        self.agents_address = ""
        """Where agents attach: with TLS another port, where every caller shows a certificate."""
        self._service: OrchestratorService | None = None
        self._supervisor = Supervisor("orchestrator")
        """Of the present term."""
        self._standing = Supervisor("election")
        self._election: Election | None = None
        self._seat = Seat("")
        """In that election."""
        self._desk = Desk((SERVICE, UPSTREAM), STREAMS)
        self._health: HealthServicer | None = None
        self._term = AsyncExitStack()
        self._open = AsyncExitStack()
        self._served = Served(config.tls, config.token_secret)
        self._ready = asyncio.Event()

    @property
    def address(self) -> str:
        """``host:port`` as really bound (port 0 asks the system for a free one)."""
        if not self._address:
            raise RuntimeError("the orchestrator has no address before start()")
        return self._address

    async def start(self) -> None:
        """With a store of its own: take up every group where it was left, serve. With a shared one: stand by,
        and do so once elected.

        Raises ``ConfigError`` for whatever the caller can mend; nothing is left open then.
        """
        check(self.config)
        self._served.read()
        alone = not shared(self.config.store)
        async with AsyncExitStack() as stack:
            if alone:  # before anything listens: who else has the store matters more than who has the port
                election = make_election(self.config.store, seat=Seat(self.config.listen))
                stack.push_async_callback(self._end_term)
                await self._begin_term(*await election.campaign())
            server, address, agents = _bind(self.config, self._served)
            server.add_generic_rpc_handlers((self._desk,))
            self._health = await _serve(server)
            stack.push_async_callback(self._end_streams, server, self._health)
            if alone:
                await self._tell_health(leading=True)
            else:
                seat = Seat(*self._advertised(address, agents), id=uuid.uuid4().hex[:12])
                election = make_election(self.config.store, seat=seat, ttl=self.config.leader_ttl)
                stack.push_async_callback(election.close)
                self._seat, self._election, self._desk.hearsay = seat, election, election.hearsay
                stack.push_async_callback(self._end_term, _STOPPING)
                stack.push_async_callback(self._standing.stop)
                self._standing.start("leader", self._stand(election, seat))
            self._open = stack.pop_all()
        self._address, self.agents_address = address, agents
        self._ready.set()
        log.info("orchestrator listens on %s", address)

    def _look(self, live: Live | None) -> None:
        """Somebody looks at the dashboard; None: nobody does any more."""
        self._observer.live = None if live is None else live.heard
        if self._watchers is not None:
            self._watchers.also = None if live is None else live.changed

    def _leader(self) -> str:
        """Where it is, as far as one who stands by knows."""
        leader = self._election.hearsay.leader if self._election is not None else None
        return leader.address if leader is not None and leader.id != self._seat.id else ""

    def _advertised(self, address: str, agents: str) -> tuple[str, str]:
        """What others are told to dial: for clients, and for agents."""
        told = self.config.advertise or address
        return told, agents if not self.config.advertise else _beside(told, address, agents)

    # ── terms ──────────────────────────────────────────────────────────────

    async def _stand(self, election: Election, seat: Seat) -> None:
        """Stand by, lead, stand by …"""
        while True:
            tenure, store = await election.campaign()
            try:
                await self._begin_term(tenure, store)
                election.hearsay.leader = seat  # who waits at the desk may come in
                await self._tell_health(leading=True)
                log.warning("this orchestrator leads now (term %d, instance %s)", tenure.term, self.instance)
                reason = await self._led(tenure)
            except StoreError as error:
                reason = str(error)
            log.warning("this orchestrator leads no longer: %s", reason)
            tenure.end(reason)
            await self._tell_health(leading=False)
            await self._end_term(End(grpc.StatusCode.UNAVAILABLE, f"it leads no longer: {reason}"))

    async def _led(self, tenure: Tenure) -> str:
        """Returns when the tenure ends, or something in it breaks, with the reason."""
        ended = asyncio.ensure_future(tenure.ended())
        broken = asyncio.ensure_future(self._supervisor.wait())
        try:
            await asyncio.wait((ended, broken), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            with contextlib.suppress(Crashed):
                broken.result()
            return tenure.over or str(broken.exception())
        finally:
            for task in (ended, broken):
                task.cancel()
            await asyncio.gather(ended, broken, return_exceptions=True)

    async def _begin_term(self, tenure: Tenure, store: Store) -> None:
        """Load what was saved, take up every group, and only then serve."""
        self.instance = uuid.uuid4().hex[:12]
        self._supervisor = Supervisor("orchestrator")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            saved = await store.load()
            clock = self._clock
            journal = Journal(
                self.config.journal,
                orchestrator=self.instance,
                max_bytes=self.config.journal_max_bytes,
                keep=self.config.journal_keep,
            )
            journal.open(clock.now())
            stack.callback(journal.close)
            stack.push_async_callback(self._supervisor.stop)
            roster = Roster(self._election, self._seat, tenure, clock) if self._election is not None else None
            self._service, upstream = self._assemble(store, saved, journal, clock, roster)
            await upstream.start()
            tenure.check()
            desk: Any = self._desk  # as far as services use it, a server
            pb_grpc.add_OrchestratorServicer_to_server(self._service, desk)
            add_TimeSliceOrchestratorServiceServicer_to_server(upstream, desk)
            self._term = stack.pop_all()

    async def _end_term(self, end: End | None = None) -> None:
        """Idempotent. ``end``: what the open streams are told; None: they ended already."""
        self._desk.close()
        self._shown = self._watchers = None
        if self.live is not None:
            self.live.lead(None)
        if self._service is not None and end is not None:
            self._service.stop(end)
        self._service = None
        await self._term.aclose()

    async def _tell_health(self, *, leading: bool) -> None:
        """The empty name stands for the process: one that stands by is healthy."""
        word = (
            health_pb2.HealthCheckResponse.SERVING if leading else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        if self._health is not None:
            for name in (SERVICE, UPSTREAM):
                await self._health.set(name, word)

    def _assemble(
        self,
        store: Store,
        saved: Mapping[str, tuple[bytes, int]],
        journal: Journal,
        clock: Clock,
        roster: Roster | None,
    ) -> tuple[OrchestratorService, UpstreamService]:
        config, watchers, traces = self.config, Watchers(), self._observer.traces

        def changed(group: GroupId) -> None:
            watchers.changed(group)
            upstream.changed(group)
            agents.changed(group)

        admission = Admissions(
            clock=clock,
            store=AdmissionStore(store, saved, clock),
            queue_limit=config.queue_limit,
            line=journal.line,
            changed=watchers.changed,
            lock_of=lambda name: groups.get(name),
        )
        groups = Groups(
            config,
            store=store,
            journal=journal,
            clock=clock,
            supervisor=self._supervisor,
            changed=changed,
            observer=self._observer,
        )
        sessions = Sessions(
            groups=groups,
            clock=clock,
            grace=config.session_grace,
            limit=config.max_sessions,
            forgotten=admission.gone,
            heap=self._heap,
        )
        agents = Agents(groups=groups, clock=clock, instance=self.instance)

        def perform(group: GroupId, effect: fx.GroupEffect) -> None:
            if isinstance(effect, fx.MakeResident):
                agents.command(group, effect, traces.command(group, effect) if traces is not None else "")
            elif isinstance(effect, fx.ForgetJob):
                agents.forget(group, effect)
            else:
                sessions.perform(group, effect)

        def note(session: Session, said: pb.Note) -> None:
            who = session.who
            allowed, left_out = session.notes.take(clock.now(), config.notes_per_s, config.notes_at_once)
            if not allowed:
                return
            if left_out:
                log.warning("job %s: %d notes left out, too many at once", who.job, left_out)
                journal.line({"t": clock.now(), "notes_left_out": {"job": who.job, "count": left_out}})
            text, name = said.text[:MAX_TEXT], said.name[:MAX_TEXT]
            journal.note(
                clock.now(),
                job=who.job,
                session=who.session,
                name=name,
                value=said.value,
                step=said.step,
                text=text,
            )

        verbs = Verbs(
            groups=groups,
            clock=clock,
            note=note,
            admission=admission,
            max_requests=config.max_requests,
            traces=traces,
        )
        upstream = UpstreamService(
            groups=groups, sessions=sessions, verbs=verbs, clock=clock, instance=self.instance
        )
        self._observer.admission = admission.heard
        groups.start(saved, perform)
        admission.resume(groups)
        self._shown = _Shown(groups, sessions, agents, journal, admission, roster)
        if self.live is not None:
            self._watchers = watchers
            term = Term(self.instance, groups=groups, admission=admission, clock=clock, roster=roster)
            self.live.lead(term)
        self._supervisor.start("admission", admission.run())
        service = OrchestratorService(
            instance=self.instance,
            groups=groups,
            sessions=sessions,
            verbs=verbs,
            agents=agents,
            admin=Admin(groups=groups, clock=clock, store=None if shared(config.store) else store),
            watchers=watchers,
            admission=admission,
            clock=clock,
            hello_timeout=config.hello_timeout,
            session_grace=config.session_grace,
            tls=config.tls is not None,
            roster=roster,
        )
        return service, upstream

    def _add_metrics(self, board: Board) -> None:
        """What is read whenever somebody asks for the metrics."""

        def of_groups() -> metrics.Taken:
            shown = self._shown
            if shown is None:
                return metrics.Taken((), self._clock.now())
            groups = tuple(lock.state for lock in shown.groups)
            return metrics.Taken(groups, self._clock.now(), shown.admission.at_door())

        def of_process() -> metrics.Process:
            if (shown := self._shown) is None:
                return metrics.Process(False, 0, 0, 0, 0)
            lost = shown.sessions.lost_count
            connected = len(shown.sessions) - lost
            standbys = shown.roster.standbys if shown.roster is not None else None
            return metrics.Process(True, connected, lost, len(shown.agents), shown.journal.lost, standbys)

        async def ask_who_stands_by() -> None:
            if (shown := self._shown) is not None and shown.roster is not None:
                await shown.roster.refresh()

        def of_counts() -> metrics.Counts:
            return metrics.Counts((), {}) if self._pushed is None else self._pushed.take()

        def of_jobs() -> job_meter.Turns:
            if (pushed := self._pushed) is None or (shown := self._shown) is None:
                return ()
            pushed.jobs.prune({lock.id: lock.state for lock in shown.groups})
            return pushed.jobs.take()

        board.before.append(ask_who_stands_by)
        board.add(Source(metrics.OF_GROUPS, of_groups, metrics.of_groups))
        board.add(Source(metrics.OF_PROCESS, of_process, metrics.of_process))
        board.add(Source(metrics.COUNTED, of_counts, metrics.of_counts))
        board.add(Source(job_meter.OF_JOBS, of_jobs, job_meter.of_jobs))

    async def wait_ready(self) -> None:
        """Returns once ``start`` is done."""
        await self._ready.wait()

    async def wait(self) -> None:
        """Blocks while all is well; raises ``runtime.supervisor.Crashed`` when a part breaks, and
        ``ConfigError`` where one who was elected cannot read what was saved: it ends, and another leads."""
        try:
            await (self._supervisor if self._election is None else self._standing).wait()
        except Crashed as crash:
            if isinstance(crash.__cause__, ConfigError):
                raise crash.__cause__ from None
            raise

    def reload(self) -> tuple[str, ...]:
        """Read token secret and certificates again; returns what changed. Raises ``ConfigError``, and goes on
        with what it had."""
        return self._served.read()

    def regroup(self, configs: Sequence[GroupConfig]) -> list[str]:
        """The groups that are configured from now on. Opens and changes what is new or different at once, and
        deletes none. Returns what was done; raises ``ConfigError``, with nothing done."""
        config = replace(self.config, groups=tuple(configs))
        check(config)
        self.config = config
        if (shown := self._shown) is None:
            return []
        shown.admission.catch_up()
        done = shown.groups.configure(config.groups)
        for lock in shown.groups:
            shown.admission.configured(lock)
        return done

    async def delete_idle(self, name: str, reason: str) -> str:
        """Delete a group that nobody is in. Returns why it was not, naming who is; empty: it is gone."""
        lock = self._shown.groups.get(name) if self._shown is not None else None
        if self._shown is None or lock is None:
            return ""
        if at_door := self._shown.admission.at_door().get(lock.id):
            return f"group {name} is in use: {at_door} request(s) wait for admission"
        try:
            await self._shown.groups.delete(lock, reason, idle=True)
        except Rejected as refusal:
            return str(refusal)
        return ""

    async def stop(self) -> None:
        """End every stream, so that clients and agents come back to a successor; keep every lease.

        Idempotent.
        """
        if self.live is not None:
            self.live.close()
        await self._open.aclose()

    async def _end_streams(self, server: grpc.aio.Server, health: HealthServicer) -> None:
        await health.enter_graceful_shutdown()
        if self._service is not None:
            self._service.stop(_STOPPING)
        await server.stop(self.config.stop_grace)


def _bind(config: OrchestratorConfig, served: Served) -> tuple[grpc.aio.Server, str, str]:
    """The server, its address, and the one for agents."""
    every = int(config.keepalive * 1000)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a second orchestrator on the port must fail, not share it
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", 4 * config.max_message_bytes),
            ("grpc.keepalive_time_ms", every),
            ("grpc.keepalive_timeout_ms", every),
            ("grpc.http2.ping_timeout_ms", every),  # by default 60 s, and it is this one that gRPC obeys
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", every // 2),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", every // 2),
            ("grpc.http2.max_ping_strikes", 0),  # an eager client is no reason to end its session
            ("grpc.http2.bdp_probe", 0),  # a ping beside every message, to size windows we never fill
        ],
        interceptors=[
            Guard(RULES, served),
            RefuseMalformed(),
        ],
    )
    if config.tls is None:
        address = _listen(config.listen, server.add_insecure_port)
        return server, address, address
    plain, mutual = (served.credentials(ask_client=ask) for ask in (False, True))
    address = _listen(config.listen, lambda at: server.add_secure_port(at, plain))
    agents = _listen(agents_address(config), lambda at: server.add_secure_port(at, mutual))
    return server, address, agents


def _listen(where: str, add_port: Callable[[str], int]) -> str:
    """The address that was bound. Raises ``ConfigError`` saying why it could not."""
    try:
        port = add_port(where)
    except RuntimeError as error:
        raise ConfigError(_why_not(where), data={"listen": where}) from error
    return where if where.startswith("unix:") else f"{where.rpartition(':')[0]}:{port}"


def _why_not(listen: str) -> str:
    """gRPC does not say why it cannot listen; the system does when asked again."""
    if listen.startswith("unix:"):
        return f"cannot listen on {listen}: its directory must exist and be writable"
    host, port = split_address(listen)
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"cannot listen on {listen}: port {port} is in use. Stop the process that has it (another "
                f"orchestrator?), or listen elsewhere; port 0 takes any free one"
            )
        return f"cannot listen on {listen}: {error.strerror or error}"
    return f"cannot listen on {listen}: the port was in use a moment ago; try again"


async def _serve(server: grpc.aio.Server) -> HealthServicer:
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE, UPSTREAM, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    for name in (SERVICE, UPSTREAM):
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    return health


def _beside(told: str, address: str, agents: str) -> str:
    """The agents' address, on the host that clients are told and as far from their port as it is here."""
    host, _, port = told.rpartition(":")
    apart = split_address(agents)[1] - split_address(address)[1]
    return f"{host}:{int(port) + apart}"
