"""``coslice simulate --admission … --drift …``: what is asked for, and what is said of it."""

import math
from collections.abc import Sequence

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from coslice.admission.model import MODES, Rules
from coslice.admission.simulated import Admission, AdmissionReport
from coslice.errors import ConfigError
from coslice.profile.model import Profile
from coslice.simulate.spec import Drift, Scenario


def gate_of(mode: str, max_slowdown: float, declared: Sequence[Profile]) -> Admission | None:
    """``declared``: profiles that jobs bring along. None: nobody keeps the door."""
    for known in MODES:
        if mode == known:
            break
    else:
        raise ConfigError(f"--admission {mode!r}: use {', '.join(MODES)}")
    if known == "off":
        return None
    if not 1.0 <= max_slowdown < math.inf:
        raise ConfigError(f"--max-slowdown {max_slowdown:g}: a ratio to the time alone, 1 or more")
    rules = Rules(mode=known, max_slowdown=max_slowdown)
    return Admission(rules, declared={profile.name: profile for profile in declared})


def drifting(scenario: Scenario, drifts: Sequence[str]) -> Scenario:
    """Jobs of the scenario with the drifts of ``JOB:AT_S:FACTOR[:on|off]``."""
    for text in drifts:
        name, drift = _drift(text)
        if name not in {job.name for job in scenario.jobs}:
            there = ", ".join(job.name for job in scenario.jobs)
            raise ConfigError(f"--drift {text!r}: there is no job {name}; there are: {there}")
        jobs = [replace(job, drift=(*job.drift, drift)) if job.name == name else job for job in scenario.jobs]
        scenario = replace(scenario, jobs=tuple(jobs))
    return scenario


def _drift(text: str) -> tuple[str, Drift]:
    parts = text.split(":")
    try:
        name, at, factor, part = [*parts, "all"][:4]
        seconds, times = float(at), float(factor)
    except ValueError:
        raise ConfigError(f"--drift {text!r}: write JOB:AT_S:FACTOR, as in math:36000:1.5") from None
    if len(parts) > 4:
        raise ConfigError(f"--drift {text!r}: write JOB:AT_S:FACTOR, or with :on or :off behind it")
    if part == "on":
        return name, Drift(seconds, times, "on")
    if part == "off":
        return name, Drift(seconds, times, "off")
    if part == "all":
        return name, Drift(seconds, times)
    raise ConfigError(f"--drift {text!r}: {part!r} is neither on nor off")


def told(console: Console, seen: AdmissionReport) -> None:
    for one in seen.decisions:
        console.print(f"[dim]{one.at:8.0f} s[/dim]  {one.code}: {escape(one.text)}", soft_wrap=True)
    since = f"from {seen.replanned_at:.0f} s on" if seen.replanned_at else "in all (nobody drifted)"
    console.print(
        f"admission {seen.mode}: {100 * seen.within:.2f} % of {seen.windows} rolling means over ten steps "
        f"within {seen.max_slowdown:g} x, {since}"
    )
    for name, job in seen.jobs.items():
        if job.dismissed or job.queued_s:
            gone = ", refused in the end" if job.dismissed else ""
            console.print(f"  {escape(name)}: queued for {job.queued_s:.0f} s{gone}")
