"""An operator's settings of a backend (``--backend NAME:key=value,…``) as values, or what of them makes no
sense. For any backend whose settings are a msgspec struct.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from coslice.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


def settings_of(
    backend: str, kind: type[S], settings: Mapping[str, object], *, positive: Sequence[str] = ()
) -> S:
    """Raises ``ConfigError``: unknown, of another type, a number below 0 or not finite; 0 for ``positive``.

    ``kind`` forbids unknown fields.
    """
    try:
        chosen = msgspec.convert(dict(settings), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"backend {backend}: {error}; it knows {known}") from None
    for name in kind.__struct_fields__:
        value = getattr(chosen, name)
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
            least = "more than 0" if name in positive else "0 or more"
            raise ConfigError(f"backend {backend}: {name} is {value:g}; give {least}")
    return chosen
