"""``register``: a job's one call to offer its state, and the handle it gets.

Reads the environment that ``coslice run`` sets; without it the handle moves nothing unless asked to.
"""

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from coslice.errors import ConfigError, CosliceError, OperationFailed
from coslice.security.credentials import credentials_from
from coslice.workload.adapters import DROP, KEEP, POLICIES, Adapter
from coslice.workload.adapters.callbacks import CallbackAdapter
from coslice.workload.channel import Identity
from coslice.workload.process import PROCESS, Group
from coslice.workload.registry import DISCARD, OFFLOAD, Registration

_log = logging.getLogger("coslice")
ANSWER_SECONDS = 10.0
"""How long ``register`` waits for the agent's answer. Later it goes on in the background."""


class Handle:
    """State that was registered. Thread-safe; in a forked child it is dead and does nothing."""

    def __init__(self, registration: Registration, group: Group) -> None:
        self._registration, self._group = registration, group
        self._pid = os.getpid()

    @property
    def _dead(self) -> bool:
        return os.getpid() != self._pid

    @property
    def state_bytes(self) -> int:
        """Registered bytes now, on the device or parked; memory that several tensors share counts once."""
        return 0 if self._dead else self._group.state.measure(self._registration)

    @property
    def parked(self) -> bool:
        """Is any of it in host memory?"""
        return not self._dead and self._group.state.parked(self._registration)

    @property
    def error(self) -> CosliceError | None:
        """Why the agent does not serve this process; None: it does, or there is none."""
        return None if self._dead or self._group.channel is None else self._group.channel.error

    def offload(self, *, tags: Iterable[str] = (), mode: str = OFFLOAD, wait: float = 0.0) -> int:
        """Move this state to host memory now; returns the bytes moved. For jobs that schedule themselves.

        ``tags``: only these regions; none: all. ``wait``: seconds for open sections to end. Raises
        ``StateBusy``, ``NoRoom``, ``OperationFailed`` (nothing has changed), ``ConfigError`` where an agent
        decides.
        """
        self._check_own()
        state = self._group.state
        return state.move_out(wait=wait, mode=mode, tags=frozenset(tags), owner=self._registration).bytes

    def restore(self) -> int:
        """Bring it back; returns the bytes moved. Raises ``NoRoom``, ``StateLost`` or ``OperationFailed``."""
        self._check_own()
        return self._group.state.move_in(self._registration).bytes

    def used(self, *tags: str) -> None:
        """These regions are used now: where only a part must leave, those used longest ago leave first."""
        if not self._dead:
            self._group.state.used(self._registration, tags)

    def refresh(self) -> None:
        """Look again and tell the agent. Needed only for state that changed outside accelerator sections."""
        if not self._dead:
            self._group.refresh()

    def close(self) -> None:
        """Take the state out of coslice's hands. Raises ``StateBusy`` while it is parked."""
        if not self._dead:
            self._group.remove(self._registration)

    def _check_own(self) -> None:
        if self._dead:
            raise OperationFailed("this handle belongs to the process that registered: register in this one")
        if self._group.agent is not None:
            raise ConfigError(
                f"the agent at {self._group.agent} moves this state: use acquire() and yield_(), or the "
                "agent's Snapshot and Restore; register without an agent to move it yourself"
            )


def register(
    model: Any = None,
    optimizer: Any = None,
    *,
    tensors: Any = None,
    arrays: Any = None,
    engine: Any = None,
    regions: Sequence[str] = (),
    probe: Callable[[], Any] | None = None,
    endpoint: str = "",
    tags: Mapping[str, str] | None = None,
    need: int | None = None,
    on_snapshot: Callable[[], Any] | None = None,
    on_restore: Callable[..., Any] | None = None,
    job: str | None = None,
    group: str | None = None,
    agent: str | None = None,
    mode: str = OFFLOAD,
    frozen: str = KEEP,
    reread: Any = None,
    verify: bool = False,
    incremental: bool = True,
    for_children: bool = False,
    env: Mapping[str, str] = os.environ,
) -> Handle:
    """Offer state to be moved while this process is off the accelerator.

    ``model``, ``optimizer``: torch modules and optimizers, one, a sequence, or ``{tag: object}``.
    ``tensors``: others, in any nesting. Regions have the tags ``weights``, ``adapter`` (names with
    ``lora_``), ``gradients`` and ``optimizer``, unless ``{tag: object}`` or ``tags={"pattern of names":
    "tag"}`` say otherwise. Tensors that come later (gradients, optimizer state) are found when state moves.

    ``arrays``: a dictionary, list or object that holds JAX arrays. ``engine``: vLLM's ``LLM`` or
    ``AsyncLLM``, SGLang's ``Engine``, or ``torch_memory_saver`` with the tags of its ``regions``; ``probe()``
    is called before it sleeps and after it woke, and must return the same. ``endpoint``: address of a vLLM or
    SGLang server that this process started; the agent moves its state over HTTP, nothing else is registered.

    ``on_snapshot()`` runs before a move out and may return bytes to keep, ``on_restore(bytes or None)`` after
    the way back, both in another thread. ``mode="discard"``: bytes are dropped and ``on_restore`` fills them
    again. ``need``: bytes of device memory this process will use at most. ``verify``: compare all of it after
    each copy, and checksum what is in host memory. ``incremental``: what did not change since it was last in
    host memory is not copied again.

    ``frozen``: what becomes of parameters without ``requires_grad`` (the base under adapters) as they leave:
    ``keep`` them in host memory like the rest, ``drop`` them and read them again from ``reread`` (paths of
    safetensors or torch files, or a function that returns the tensors), or ``share`` one host copy with all
    processes of the node that have the same (on the host accelerator one device copy with the jobs of the
    group, too). Checked by content, each way.

    ``for_children``: this process uses no accelerator; it stands for its children, which a whole-process
    backend moves. They may then be frozen in the middle of a phase too, and the callbacks run at such a time.

    Raises ``ConfigError`` for state that cannot move. A refusal by the agent is logged and kept in ``error``.
    """
    if mode not in (OFFLOAD, DISCARD):
        raise ConfigError(f"{mode!r} is no mode of moving state: use {OFFLOAD} or {DISCARD}")
    if mode == DISCARD and on_restore is None:
        raise ConfigError("mode discard drops the bytes: give an on_restore callback that brings them back")
    if (
        frozen not in POLICIES
        or (frozen == DROP) != (reread is not None)
        or (frozen, mode) == (DROP, DISCARD)
    ):
        raise ConfigError(
            f"frozen={frozen!r}: use keep, share, or drop with reread= (files or a function) and mode offload"
        )
    address = agent or env.get("COSLICE_AGENT") or None
    group_name = group if group is not None else env.get("COSLICE_GROUP", "").split(",")[0].strip()
    job_name = job or env.get("COSLICE_JOB", "")
    if address and not job_name:
        raise ConfigError("the job has no name: start it with `coslice run --job NAME`, or pass job=")

    adapter = _torch_adapter(model, optimizer, tensors, tags, env.get("COSLICE_DEVICE", ""))
    if adapter is not None:
        adapter.incremental, adapter.verify = incremental, verify
        if frozen != KEEP:
            adapter.freeze(frozen, reread)
    elif frozen != KEEP:
        raise ConfigError("frozen= is about parameters of a torch model: pass model=")
    adapters: list[Adapter] = [] if adapter is None else [adapter]
    if arrays is not None:
        from coslice.workload.adapters.jax import JaxAdapter

        adapters.append(JaxAdapter(arrays))
    if engine is not None:
        from coslice.workload.adapters.engine import engine_adapter

        adapters.append(engine_adapter(engine, regions=regions, probe=probe))
    if endpoint and adapters:
        raise ConfigError(
            "the agent moves the server at endpoint= as a whole: register model, arrays or engine for "
            "another group, or from another process"
        )
    if on_snapshot is not None or on_restore is not None or endpoint:
        adapters.append(CallbackAdapter(on_snapshot, on_restore))
    if not adapters:
        raise ConfigError(
            "nothing to register: pass model=, optimizer=, tensors=, arrays=, engine=, endpoint= or callbacks"
        )

    identity = Identity(
        job=job_name,
        incarnation=env.get("COSLICE_INCARNATION", ""),
        group=group_name,
        rank=_number(env, "COSLICE_RANK", _number(env, "RANK", 0)),
        device=_device(adapters) or env.get("COSLICE_DEVICE") or "host",
        backend=f"app_endpoint:url={endpoint}" if endpoint else env.get("COSLICE_BACKEND", ""),
        socket=env.get("COSLICE_AGENT_SOCKET", ""),
        credentials=credentials_from(env),
    )
    needed = _number(env, "COSLICE_NEED", 0) if need is None else need
    kinds = {"arrays": arrays, "engine": engine, endpoint or "endpoint": endpoint or None}
    rest = [name for name, given in kinds.items() if given is not None] or ["callbacks"]
    names: Collection[str] = adapter.roots.names if adapter is not None else rest
    registration = Registration(
        ", ".join(names), adapters, mode, refills=on_restore is not None, for_children=for_children
    )
    joined = PROCESS.join(registration, identity, agent=address, need=needed, verify=verify)
    if joined.channel is not None and not joined.channel.wait_answered(ANSWER_SECONDS):
        _log.warning(
            "coslice: no agent answers at %s yet; dialling on (start one with `coslice up`)", address
        )
    return Handle(registration, joined)


def _device(adapters: Sequence[Adapter]) -> str:
    return next((str(device) for each in adapters if (device := getattr(each, "device", ""))), "")


def _torch_adapter(
    model: Any, optimizer: Any, tensors: Any, tags: Mapping[str, str] | None, device: str
) -> Any:
    if model is None and optimizer is None and tensors is None:
        return None
    if "torch" not in sys.modules:
        raise ConfigError(
            "model, optimizer and tensors are torch's, and torch is not loaded: use callbacks instead"
        )
    from coslice.workload.adapters.torch import TorchAdapter, make_roots

    adapter = TorchAdapter(make_roots(model, optimizer, tensors, tags), device=device)
    adapter.check()
    return adapter


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a whole number of 0 or more")
    return int(text)
