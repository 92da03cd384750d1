"""Ray: the identity of a job travels to its tasks and actors in their ``runtime_env``.

::

    Trainer.options(runtime_env=runtime_env(group="train")).remote()

In the actor ``coslice.connect()`` finds everything in its environment, and ``@orchestrator.on_accelerators``
works on its methods, plain or ``async``, as it does anywhere. ``get`` is ``ray.get`` for somebody who holds
accelerators: others may have them until the result is there.

Imports ray in ``get`` only; without an orchestrator ``runtime_env`` adds nothing.
"""

import contextlib
import functools
import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from coslice.client.sync import Client
from coslice.errors import ConfigError, LeaseLost

_CARRIED = (
    "COSLICE_ORCHESTRATOR",
    "COSLICE_JOB",
    "COSLICE_INCARNATION",
    "COSLICE_GROUP",
    "COSLICE_TRAINER_GROUP",
    "COSLICE_SAMPLER_GROUP",
    "COSLICE_TLS_CA",
    "COSLICE_TLS_CERT",
    "COSLICE_TLS_KEY",
    "COSLICE_TOKEN_FILE",
    "COSLICE_RECORD_PHASES",
)
"""What is the same on every node. A token itself is not carried: Ray shows a runtime_env to everybody. Nor is
a node's name, and an agent's address only where it means the agent of whichever node the process is on."""
_LOCAL = ("127.", "localhost:", "[::1]:", "unix:")
_incarnations: dict[str, str] = {}


def runtime_env(
    job: str = "",
    group: str | Iterable[str] = (),
    *,
    trainer: str = "",
    sampler: str = "",
    incarnation: str = "",
    cpus: Iterable[int] = (),
    need: int = 0,
    world: int = 0,
    env: Mapping[str, str] | None = None,
    extend: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A ``runtime_env`` that makes a task or an actor a member of a job.

    What is not given comes from ``env`` (default: this process's environment, as ``coslice run`` or a
    ``runtime_env`` of the driver set it). ``group``: the group of this actor's accelerators, or several.
    ``trainer``, ``sampler``: groups for a process that runs phases of both roles. All members of one start of
    the job get one ``incarnation``; it is made up once per process where there is none. ``cpus``: cores of a
    host accelerator. ``need``: bytes of device memory per node. ``extend``: a ``runtime_env`` to add to.
    """
    found = os.environ if env is None else env
    extended = dict(extend or {})
    if not found.get("COSLICE_ORCHESTRATOR"):
        return extended
    job = job or found.get("COSLICE_JOB", "")
    if not job:
        raise ConfigError(
            "the job has no name: give runtime_env(job=...), start the driver with `coslice run --job NAME`, "
            "or set COSLICE_JOB"
        )
    groups = (group,) if isinstance(group, str) else tuple(group)
    variables = {name: found[name] for name in _CARRIED if found.get(name)}
    agent = found.get("COSLICE_AGENT", "")
    given = {
        "COSLICE_JOB": job,
        "COSLICE_INCARNATION": incarnation or _incarnation(job, found),
        "COSLICE_GROUP": ",".join(filter(None, groups)),
        "COSLICE_TRAINER_GROUP": trainer,
        "COSLICE_SAMPLER_GROUP": sampler,
        "COSLICE_AGENT": agent if agent.startswith(_LOCAL) else "",
        "COSLICE_ACCELERATOR_CPUS": ",".join(map(str, cpus)),
        "COSLICE_NEED": str(need) if need else "",
        "COSLICE_WORLD": str(world) if world else "",
    }
    variables |= {name: value for name, value in given.items() if value}
    extended["env_vars"] = {**extended.get("env_vars", {}), **variables}
    return extended


def carry() -> None:
    """From now on ``ray.init`` of this process gives the job's identity to all tasks and actors.

    For frameworks that call ``ray.init`` themselves. Where Ray is initialized already: too late, use
    ``runtime_env``. Without an orchestrator nothing changes.
    """
    import ray

    init = ray.init
    if not os.environ.get("COSLICE_ORCHESTRATOR") or _carries(init):
        return

    @functools.wraps(init)
    def carrying(*args: Any, runtime_env: Any = None, **kwargs: Any) -> Any:
        return init(*args, runtime_env=_extended(runtime_env), **kwargs)

    carrying._coslice = True  # type: ignore[attr-defined]
    ray.init = carrying


def _carries(init: Any) -> bool:
    return getattr(init, "_coslice", False) is True


def _extended(given: Any) -> dict[str, Any]:
    return runtime_env(extend=dict(given or {}))


def _incarnation(job: str, env: Mapping[str, str]) -> str:
    """One token for all members that this process starts, and for this process itself."""
    if env.get("COSLICE_INCARNATION") and env.get("COSLICE_JOB", job) == job:
        return env["COSLICE_INCARNATION"]
    token = _incarnations.setdefault(job, uuid.uuid4().hex)
    if env is os.environ and env.get("COSLICE_JOB") == job:
        os.environ["COSLICE_INCARNATION"] = token  # a client of ours is a member of the same start
    return token


def get(refs: Any, *, client: Client, phase: str = "", timeout: float | None = None) -> Any:
    """``ray.get`` inside an accelerator section: others may have the accelerators until ``refs`` are there.

    Results that are there already are taken without giving anything up, unless somebody waits too long
    (``should_yield``). Afterwards the accelerators are ours again, for ``phase``, also when the result is an
    exception. ``timeout``: of ``ray.get``.
    """
    import ray

    if client.is_noop:
        return ray.get(refs, timeout=timeout)
    wanted = list(refs) if isinstance(refs, (list, tuple)) else [refs]
    there, _ = ray.wait(wanted, num_returns=len(wanted), timeout=0, fetch_local=False)
    if len(there) == len(wanted) and not client.should_yield():
        return ray.get(refs, timeout=timeout)
    with contextlib.suppress(LeaseLost):  # gone already: what follows is the same
        client.yield_()
    try:
        return ray.get(refs, timeout=timeout)
    finally:
        client.acquire(phase=phase)
