"""What an operator may set for the ``cuda`` backend, and what of it makes no sense."""

import contextlib
import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from coslice.agent.backends.cuda_calls import Pair
from coslice.agent.backends.settings import settings_of
from coslice.errors import ConfigError


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set (``--backend cuda:lock_timeout=10,…``)."""

    calls: Literal["auto", "bindings", "program"] = "auto"
    """Who calls the driver: cuda-bindings, or the cuda-checkpoint program. auto: what is installed."""
    program: str = "cuda-checkpoint"
    lock_timeout: float = 30.0
    """Seconds in which a process must finish its work on the device; else it is busy."""
    base_seconds: float = 60.0
    """A driver call that moves no bytes may take so long before it counts as hanging for good."""
    slowest: float = 200e6
    """Bytes per second that a copy moves at least; hung and slow are told apart by it."""
    margin: int = 32 << 20
    """Bytes that must be free beside what comes back."""
    settle: float = 5.0
    """Seconds that freed device memory may take to be seen as free."""
    tries: int = 3
    remap: str = ""
    """``GPU-old=GPU-new`` with spaces between pairs: devices to restore onto, a permutation. The node's other
    devices stay."""


def read_settings(settings: Mapping[str, object]) -> Settings:
    """Raises ``ConfigError`` for settings that are unknown or make no sense."""
    positive = ("lock_timeout", "base_seconds", "slowest", "tries")
    return settings_of("cuda", Settings, settings, positive=positive)


def read_pairs(text: str) -> tuple[Pair, ...]:
    pairs = []
    for part in text.split():
        old, equals, new = part.partition("=")
        if not equals or not all(uuid.strip().startswith("GPU-") for uuid in (old, new)):
            raise ConfigError(f"backend cuda: remap {part!r} is not GPU-old=GPU-new")
        pairs.append((old.strip(), new.strip()))
    if sorted(old for old, _ in pairs) != sorted(new for _, new in pairs):
        raise ConfigError("backend cuda: remap must be a permutation: every device once on either side")
    if all(old == new for old, new in pairs):
        return ()  # stay off the driver's way of moving processes between devices
    return tuple(pairs)


def check_bindings() -> None:
    """Can the installed cuda-bindings restore onto other devices? Raises ``ConfigError``."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("cuda-bindings")
        if version.partition(".")[0] == "12":
            raise ConfigError(
                f"backend cuda: remap needs cuda-bindings 13.4 or later, and {version} is installed: pip "
                "install -U 'cuda-bindings>=13.4', or leave remap out"
            )
