"""A profile from two figures: for a job that nobody has measured yet, or a what-if."""

from coslice.errors import ConfigError
from coslice.profile.model import Durations, Phase, Profile, Source, make_pool
from coslice.profile.options import ReadOptions


def given_profile(
    name: str, *, busy: float, period: float, options: ReadOptions, state_bytes: int = 0
) -> Profile:
    """``busy`` seconds of every ``period``, constant. Raises ``ConfigError``."""
    if not 0 < busy <= period:
        raise ConfigError(
            f"--busy {busy:g} --period {period:g}: busy is more than 0 and at most the period, in seconds"
        )
    staleness = options.staleness or 0.0
    wait = Phase(
        name="wait",
        phase="generate",
        on=False,
        duration=Durations(mean=period - busy),
        coupling="buffered" if staleness else "closed",
        staleness=staleness,
    )
    train = Phase(name="train", phase="train", on=True, duration=Durations(mean=busy))
    pool = make_pool("trainer", [wait, train], accelerators=options.accelerators, state_bytes=state_bytes)
    return Profile(name=name, pools=(pool,), source=Source(kind="given"))
