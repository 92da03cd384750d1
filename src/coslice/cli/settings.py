"""``--set NAME=VALUE``: times and limits of the long-running processes, by the names that they have in code.

Which there are is read from the configurations themselves: every number and every choice that has no option
of its own. Whether the values make sense is for the configurations to say.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from coslice.errors import ConfigError
from coslice.sizes import parse_size

OWN_OPTION = frozenset(
    {"host_budget", "host_per_job", "disk_budget", "leader_ttl", "default_admission", "default_max_slowdown"}
)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|)")

C = TypeVar("C", bound=Struct)
Settings = Mapping[str, str]


def parse_settings(words: Iterable[str], *kinds: type[Struct]) -> Settings:
    """``NAME=VALUE`` of each word; raises ``ConfigError`` for a name that none of the configurations has."""
    found: dict[str, str] = {}
    known = {name: default for kind in kinds for name, default in settable(kind).items()}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise ConfigError(f"--set {word!r}: write NAME=VALUE, for example max_hold=30m. {_all(known)}")
        if name not in known:
            raise ConfigError(f"--set {word!r}: there is no {name!r} here. {_all(known)}")
        if name in found:
            raise ConfigError(f"--set {name} is given twice")
        found[name] = value
    return found


def applied(config: C, settings: Settings) -> C:
    """The configuration with those of the settings that are its own; raises ``ConfigError``."""
    mine = settable(type(config))
    types = {field.name: field.type for field in msgspec.structs.fields(type(config))}
    changes = {name: _value(name, text, types[name]) for name, text in settings.items() if name in mine}
    return msgspec.structs.replace(config, **changes)


def settable(kind: type[Struct]) -> dict[str, object]:
    """Names with their defaults."""
    return {
        field.name: field.default
        for field in msgspec.structs.fields(kind)
        if (field.type in (int, float) or get_origin(field.type) is Literal)
        and field.default is not msgspec.NODEFAULT
        and field.name not in OWN_OPTION
    }


def _all(known: Mapping[str, object]) -> str:
    pairs = (f"{n}={d:g}" if isinstance(d, float) else f"{n}={d}" for n, d in sorted(known.items()))
    return f"There are, with their defaults: {', '.join(pairs)}"


def _value(name: str, text: str, kind: Any) -> object:
    if kind is float:
        match = _TIME.fullmatch(text)
        if match is None:
            raise ConfigError(f"--set {name}={text}: give seconds, or a number with ms, s, m or h: 30m")
        return float(match[1]) * _SECONDS[match[2]]
    if kind is int and name.endswith("_bytes"):
        return parse_size(text)
    if kind is int:
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"--set {name}={text}: give a whole number")
        return int(text)
    if text not in get_args(kind):
        raise ConfigError(f"--set {name}={text}: choose one of {', '.join(get_args(kind))}")
    return text
