"""Sizes of memory as people write them: ``512MiB``, ``1.5 GiB``, ``4GB``, ``1048576``."""

import re

from coslice.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes in ``text``; raises ``ConfigError`` naming the accepted forms.

    Like the tools people know, a bare ``M`` means MiB and ``MB`` means 10⁶.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size: write a number and a unit, such as 512MiB, 1.5GiB or 4GB")
    size = int(float(match[1]) * unit)
    if size <= 0:
        raise ConfigError(f"{text!r} is not a size: it must be more than zero bytes")
    return size


def format_size(size: float) -> str:
    """``size`` bytes for people, in binary units: ``37.5 MiB``."""
    for unit, step in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= step:
            return f"{size / step:.1f} {unit}".replace(".0 ", " ")
    return f"{int(size)} B"
