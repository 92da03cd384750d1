"""Numbers of a command line. Option parsers take ``nan`` and ``inf`` for numbers; nothing here means them."""

from coslice.errors import ConfigError
from coslice.profile.number import LONGEST


def within(option: str, value: float | None, *, least: float = 0.0, most: float = LONGEST) -> None:
    """None: not given. Raises ``ConfigError``."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{option} {value:g}: a number from {least:g} to {most:g}")
