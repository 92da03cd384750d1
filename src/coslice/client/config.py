"""Where a client's settings come from: arguments first, then the environment that ``coslice run`` sets.

Reads an environment that it is given; touches nothing and imports nothing of the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from coslice.errors import ConfigError
from coslice.security.credentials import PLAIN, Credentials, credentials_from
from coslice.wire.leader import addresses_of

ORCHESTRATOR = "COSLICE_ORCHESTRATOR"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    address: str | None = None
    """``host:port`` or ``unix:path`` of the orchestrator, or several with commas between, of which one leads;
    None: every call is a no-op."""
    job: str = ""
    groups: tuple[str, ...] = ()
    """Used where a call names none."""
    incarnation: str = ""
    """Token of this start of the job, shared by its processes; empty: whoever has the job's name joins."""
    node: str = ""
    """The node as its agent calls it; empty: the host's name."""
    rank: int = 0
    world: int = 0
    """Processes that must yield before the lease ends; 0: those that acquired it."""
    need: int = 0
    """Device memory in bytes per node; 0: unknown."""
    profile: str = ""
    """What the job says that it will do: a coslice profile as JSON (``COSLICE_PROFILE``); empty: nothing."""
    cpus: tuple[int, ...] = ()
    """Cores of a host accelerator; sections pin their thread to them."""
    connect_timeout: float = 10.0
    """Seconds until a call gives up on an orchestrator that never answered."""
    reconnect_timeout: float = 60.0
    """The same for one that answered before; requests keep their place meanwhile."""
    credentials: Credentials = PLAIN
    """TLS and token; from the environment they are ``COSLICE_TLS_CA`` and ``COSLICE_TOKEN`` (security.md)."""
    yield_timeout: float = 10.0
    """Seconds that a yield waits for its confirmation. Unconfirmed it is sent again until it arrives."""

    def __post_init__(self) -> None:
        if self.address is None:
            return
        try:
            addresses_of(self.address)
        except ConfigError as error:
            raise ConfigError(f"{error} ({ORCHESTRATOR})") from None
        if not self.job:
            raise ConfigError(
                "the job has no name: start it with `coslice run --job NAME`, or set COSLICE_JOB"
            )


def settings_from(env: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from ``env``, each of them replaced by an override of the same name that is not None."""
    known = {field.name for field in fields(ClientConfig)}
    if unknown := sorted(set(overrides) - known):
        raise ConfigError(f"unknown setting {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    settings: dict[str, Any] = {
        "address": env.get(ORCHESTRATOR) or None,
        "job": env.get("COSLICE_JOB", ""),
        "groups": group_names(env.get("COSLICE_GROUP", "")),
        "incarnation": env.get("COSLICE_INCARNATION", ""),
        "node": env.get("COSLICE_NODE", ""),
        "rank": _number(env, "COSLICE_RANK", _number(env, "RANK", 0)),
        "world": _number(env, "COSLICE_WORLD", 0),
        "need": _number(env, "COSLICE_NEED", 0),
        "profile": env.get("COSLICE_PROFILE", ""),
        "credentials": credentials_from(env),
        "cpus": _cpus(env.get("COSLICE_ACCELERATOR_CPUS", "")),
    }
    return settings | {name: value for name, value in overrides.items() if value is not None}


def group_names(groups: str | Sequence[str]) -> tuple[str, ...]:
    """One name, a comma list or a sequence of names, as a tuple without repeats."""
    names = _names(groups) if isinstance(groups, str) else tuple(groups)
    return tuple(dict.fromkeys(names))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    try:
        number = int(text) if text else default
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{name}={text!r} is not a whole number of 0 or more")
    return number


def _cpus(text: str) -> tuple[int, ...]:
    try:
        cpus = tuple(int(part) for part in _names(text))
    except ValueError:
        cpus = (-1,)
    if any(cpu < 0 for cpu in cpus):
        raise ConfigError(f"COSLICE_ACCELERATOR_CPUS={text!r} is not a list of cores such as 2,3")
    return cpus
