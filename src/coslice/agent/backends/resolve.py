"""Which backend moves a job's state: found by entry point, made from the node's settings, chosen per job.

    the request's → a live workload channel with state → the job's own configuration → the node's default

What is malformed anywhere in that order is an error; it never means the next in the order. A job whose state
was parked by one backend is brought back by that one.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from msgspec import Struct

from coslice.agent.ahead import Ahead
from coslice.agent.backends.base import (
    Backend,
    Capabilities,
    Elastic,
    Factory,
    MoveError,
    NodeContext,
    Presence,
    ProcessRef,
    Restored,
    Snapshotted,
)
from coslice.agent.members import Member
from coslice.errors import ConfigError

log = logging.getLogger(__name__)

GROUP = "coslice.backends"
CHANNEL = "app_channel"
KEYS = "backend/"


class BackendSpec(Struct, frozen=True, kw_only=True):
    name: str
    settings: dict[str, str]


def parse_backends(texts: Sequence[str]) -> list[BackendSpec]:
    """In their order; raises ``ConfigError`` also for one that is named twice."""
    specs = [parse_backend(text) for text in texts]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--backend names {', '.join(twice)} twice: give all its settings once")
    return specs


def parse_backend(text: str) -> BackendSpec:
    """``NAME`` or ``NAME:key=value,key=value``; raises ``ConfigError``. A value may hold ``=`` and ``:``."""
    name, colon, rest = text.partition(":")
    settings = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(f"backend {text!r}: write NAME or NAME:key=value,key=value, not {part!r}")
        if key.strip() in settings:
            raise ConfigError(f"backend {text!r}: {key.strip()} is set twice")
        settings[key.strip()] = value.strip()
    if not name.strip():
        raise ConfigError(f"backend {text!r} has no name: write NAME or NAME:key=value,key=value")
    return BackendSpec(name=name.strip(), settings=settings)


def installed() -> dict[str, Factory]:
    """Every backend that is installed here, by name. None is loaded before it is used."""
    return {entry.name: _Loaded(entry.name) for entry in entry_points(group=GROUP)}


class _Loaded:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, node: NodeContext, settings: Mapping[str, object]) -> Backend:
        """Raises ``ConfigError``, also for what others' packages do wrong: a user can change it."""
        entries = tuple(entry_points(group=GROUP, name=self._name))
        if len({entry.value for entry in entries}) > 1:
            places = ", ".join(sorted(entry.value for entry in entries))
            raise ConfigError(f"backend {self._name} is installed more than once ({places}): uninstall one")
        what = f"backend {self._name} ({entries[0].value})"
        try:
            factory: Factory = entries[0].load()
        except Exception as error:
            raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            made = factory(node, settings)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
        needed = (name for name, value in vars(Backend).items() if callable(value) and name[0] != "_")
        if lacking := [name for name in needed if not callable(getattr(made, name, None))]:
            raise ConfigError(f"{what} has no {', '.join(lacking)}: see docs/adding-a-backend.md")
        return made


class Backends:
    """All backends of a node behind the face of one: each call goes to the one that is chosen for the
    members.
    """

    def __init__(
        self,
        node: NodeContext,
        *,
        default: str = CHANNEL,
        settings: Mapping[str, Mapping[str, object]] | None = None,
        factories: Mapping[str, Factory] | None = None,
    ) -> None:
        """``default`` and every backend with settings, or with state from an earlier agent, are made now, so
        that what is wrong with them is said now. Raises ``ConfigError``."""
        self._node, self._settings = node, dict(settings or {})
        self._factories = dict(installed() if factories is None else factories)
        self._made: dict[str, Backend] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._default = default
        stored = {key.split("/")[1] for key in node.found if key.startswith(KEYS) and key.count("/") > 1}
        for name in (CHANNEL, default, *sorted(self._settings), *sorted(stored & self._factories.keys())):
            self.named(name)

    # ── choosing ───────────────────────────────────────────────────────────

    def named(self, name: str) -> Backend:
        """Raises ``ConfigError``: not installed, or its settings make no sense."""
        if name not in self._made:
            if name not in self._factories:
                known = ", ".join(sorted(self._factories)) or "none"
                raise ConfigError(f"there is no backend {name!r}; installed are: {known}")
            self._made[name] = self._factories[name](self._node, self._settings.get(name, {}))
        return self._made[name]

    def check_job(self, text: str) -> None:
        """Raises ``ConfigError`` unless a job may ask for this backend in these words."""
        spec = parse_backend(text)
        self.named(spec.name).check(spec.settings)

    def name_for(self, members: Sequence[Member], *, explicit: str = "") -> str:
        """Raises ``ConfigError`` or ``MoveError``; never picks another than the first that is named."""
        holder = next((name for name, made in sorted(self._made.items()) if made.holds(members)), "")
        if holder:
            if explicit and explicit != holder:
                raise MoveError(f"backend {holder} has the state of {members[0].job}: only it can restore it")
            return holder
        if explicit:
            self.named(explicit)
            return explicit
        if any(member.state_bytes > 0 and (member.connected or member.parked) for member in members):
            return CHANNEL
        wanted = sorted({member.backend for member in members if member.backend})
        if len(wanted) > 1:
            raise MoveError(
                f"the processes of {members[0].job} ask for different backends ({', '.join(wanted)}): give "
                "all the same"
            )
        if wanted:
            name = parse_backend(wanted[0]).name
            self.named(name)
            return name
        return self._default

    def choose(self, members: Sequence[Member], *, explicit: str = "") -> Backend:
        return self.named(self.name_for(members, explicit=explicit))

    def freezes(self, member: Member) -> bool:
        """Will its backend move it as it is, whatever it is doing? Not where the process has to help: it does
        so outside its accelerator sections only."""
        if not member.any_time:
            return False
        try:
            return self.choose([member]).capabilities().whole_process
        except (ConfigError, MoveError):
            return False

    def asks(self, member: Member) -> bool:
        """Will its backend move it by asking the process itself?"""
        try:
            return self.choose([member]).capabilities().in_process
        except (ConfigError, MoveError):
            return False

    async def _chosen(self, members: Sequence[Member], explicit: str = "") -> Backend:
        try:
            name = self.name_for(members, explicit=explicit)
        except ConfigError as error:
            raise MoveError(str(error)) from None
        await self._started(name)
        return self._made[name]

    async def _started(self, name: str) -> None:
        task = self._starting.get(name)
        if task is None:
            task = self._starting[name] = asyncio.create_task(self._made[name].start())
        await asyncio.shield(task)

    # ── the backend protocol ───────────────────────────────────────────────

    def capabilities(self) -> Capabilities:
        """Of the node's default."""
        return self._made[self._default].capabilities()

    def check(self, settings: Mapping[str, str]) -> None:
        self._made[self._default].check(settings)

    def deadline(self, size: int) -> float:
        """The longest of any that may be asked."""
        return max(backend.deadline(size) for backend in self._made.values())

    def deadline_for(self, members: Sequence[Member]) -> float:
        size = sum(max(member.usage(), member.state_bytes) for member in members)
        try:
            return self.choose(members).deadline(size)
        except (ConfigError, MoveError):
            return self.deadline(size)

    async def snapshot(
        self,
        members: Sequence[Member],
        *,
        op: str,
        mode: str = "offload",
        tags: Sequence[str] = (),
        backend: str = "",
    ) -> Snapshotted:
        """``backend``: the one that the request names."""
        if not members:
            return Snapshotted(bytes=0, residual=0, seconds=0.0)
        chosen = await self._chosen(members, backend)
        return await chosen.snapshot(members, op=op, mode=mode, tags=tags)

    async def snapshot_part(
        self, members: Sequence[Member], *, op: str, least: int, ahead: Ahead | None = None
    ) -> Snapshotted:
        """Of backends that know no parts everything is moved, and nothing meanwhile."""
        if not members:
            return Snapshotted(bytes=0, residual=0, seconds=0.0)
        chosen = await self._chosen(members)
        if isinstance(chosen, Elastic):
            return await chosen.snapshot_part(members, op=op, least=least, ahead=ahead)
        return await chosen.snapshot(members, op=op)

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        if not members:
            return Restored(bytes=0, seconds=0.0)
        return await (await self._chosen(members)).restore(members, op=op)

    async def probe(self, members: Sequence[Member]) -> Presence:
        if not members:
            return Presence(live=0, parked=0, device_bytes=0)
        return await (await self._chosen(members)).probe(members)

    def holds(self, members: Sequence[Member]) -> bool:
        return any(backend.holds(members) for backend in self._made.values())

    async def start(self) -> None:
        await asyncio.gather(*(self._started(name) for name in tuple(self._made)))

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        if not members:
            return ()
        try:
            return await (await self._chosen(members)).retire(members)
        except MoveError as error:
            log.warning("%s is ended as it is: %s", members[0].job, error)
            return ()

    async def close(self) -> None:
        for task in self._starting.values():
            task.cancel()
        for backend in self._made.values():
            await backend.close()
