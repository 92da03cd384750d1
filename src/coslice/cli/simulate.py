"""``coslice simulate``: what would these jobs do to each other? Profiles in, figures (and a replay) out."""

import json as jsonlib
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from coslice.admission.simulated import AdmissionReport
from coslice.cli.finite import within
from coslice.cli.profile import note
from coslice.cli.scenario import MOST_A_HOUR, read_scenario
from coslice.cli.simulate_admission import drifting, gate_of
from coslice.cli.simulate_admission import told as say_admission
from coslice.core.ids import check_name
from coslice.core.policy import policy_named
from coslice.errors import ConfigError
from coslice.profile.given import given_profile
from coslice.profile.model import Profile
from coslice.profile.number import LONGEST
from coslice.profile.options import ReadOptions
from coslice.profile.read import read_all
from coslice.simulate.from_profile import job_of
from coslice.simulate.report import Report
from coslice.simulate.run import simulate
from coslice.simulate.solo import alone
from coslice.simulate.spec import Faults, Job, Pool, Scenario, SwapCost, whole_swap
from coslice.sizes import parse_size

console = Console(highlight=False, emoji=False)
if not console.is_terminal:
    console.width = 140  # nothing is cut off in a file
POLICY = "fair_share"
SLOWDOWN = 1.10
MOST_FAULTS = {"crashes": MOST_A_HOUR, "outages": MOST_A_HOUR, "failed_moves": 1.0}
STEPS = 200
"""By default the simulation lasts for so many steps of the job with the longest ones."""


class SimulateOptions(Struct, frozen=True, kw_only=True):
    jobs: tuple[str, ...]
    scenario: Path | None = None
    policy: str = ""
    """Empty: the scenario's, or ``POLICY``."""
    compare: tuple[str, ...] = ()
    swap_s: float | None = None
    bandwidth: str | None = None
    overlap: float | None = None
    device: str | None = None
    host: str | None = None
    staleness: float | None = None
    hours: float | None = None
    faults: tuple[str, ...] = ()
    admission: str = "off"
    max_slowdown: float | None = None
    declared: bool = False
    drift: tuple[str, ...] = ()
    """``JOB:AT_S:FACTOR``, or with ``:on`` or ``:off`` behind it."""
    seed: int | None = None
    """None: the scenario's, or 0."""
    json: Path | None = None
    journal: Path | None = None
    replay: Path | None = None
    perfetto: Path | None = None


def run_simulate(options: SimulateOptions) -> None:
    """Prints one table; raises ``ConfigError`` for what the caller can mend."""
    within("--swap-s", options.swap_s)
    within("--staleness", options.staleness)
    within("--hours", options.hours, most=LONGEST / 3600)
    if options.hours == 0:
        raise ConfigError("--hours 0: give a time above 0")
    if options.admission == "off" and (options.max_slowdown is not None or options.declared):
        raise ConfigError("--max-slowdown and --declared are of --admission: say warn or enforce there")
    for policy in (options.policy or POLICY, *options.compare):
        try:
            policy_named(policy)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    scenario = drifting(_scenario(options), options.drift)
    results = [
        _one(msgspec.structs.replace(scenario, policy=policy), options, first=index == 0)
        for index, policy in enumerate(options.compare or (scenario.policy,))
    ]
    reports = [report for report, _ in results]
    if reports[0].window_s <= 0:
        raise ConfigError(f"all jobs had left before the warmup of {scenario.warmup:g} s was over")
    if options.json is not None:
        told = [figures(*result) for result in results]
        whole = {"policies": {each["policy"]: each for each in told}} if options.compare else told[0]
        _write(options.json, jsonlib.dumps(whole, indent=1) + "\n")
    if options.compare:
        console.print(comparison(reports))
    else:
        _print(reports[0])
    for _, admission in results:
        if admission is not None:
            say_admission(console, admission)


def figures(report: Report, admission: AdmissionReport | None = None) -> dict[str, object]:
    """The report as plain data, for ``--json``."""
    found = dict(msgspec.to_builtins(report))
    return found if admission is None else {**found, "admission": msgspec.to_builtins(admission)}


Result = tuple[Report, AdmissionReport | None]


def _one(scenario: Scenario, options: SimulateOptions, *, first: bool) -> Result:
    """``first``: of several policies the first is the one that is drawn."""
    drawn = first and (options.journal or options.replay or options.perfetto)
    given = profiles(options.jobs, options.staleness) if options.declared else ()
    gate = gate_of(options.admission, options.max_slowdown or SLOWDOWN, given)
    if not drawn:
        report = simulate(scenario, progress=_progress(scenario), gate=gate)
        return report, gate.report() if gate is not None else None
    with tempfile.TemporaryDirectory() as folder:
        journal = options.journal or Path(folder) / "journal.jsonl"
        report = simulate(scenario, journal=journal, progress=_progress(scenario), gate=gate)
        _draw(journal, options)
    return report, gate.report() if gate is not None else None


def _draw(journal: Path, options: SimulateOptions) -> None:
    from coslice.cli.show import write_replay

    if options.replay is not None or options.perfetto is not None:
        write_replay(journal, options.replay, options.perfetto)


def _progress(scenario: Scenario) -> Callable[[float], None] | None:
    if not sys.stderr.isatty() or not scenario.until:
        return None

    def say(now: float) -> None:
        print(f"\r{100 * now / scenario.until:.0f} % of {scenario.until:.0f} s", end="\r", file=sys.stderr)

    return say


# ── what is asked for ──────────────────────────────────────────────────────


def _scenario(options: SimulateOptions) -> Scenario:
    if options.scenario is not None:
        if options.jobs:
            raise ConfigError("give either job profiles or --scenario, not both")
        return _read_scenario(options.scenario, options)
    if not options.jobs:
        raise ConfigError("nothing to simulate: name profiles, logs or step files, or write NAME=ON/OFF")
    found = profiles(options.jobs, options.staleness)
    _say_which(found)
    jobs = [job_of(profile, seed=options.seed or 0) for profile in found]
    longest = max(_step_s(job) for job in jobs)
    until = options.hours * 3600 if options.hours is not None else STEPS * longest
    pool = Pool(
        name="pool",
        device=parse_size(options.device) if options.device else 0,
        host=parse_size(options.host) if options.host else 0,
    )
    if options.device:  # then their needs are what they hold, so that who fits stays
        jobs = [msgspec.structs.replace(job, need=job.bytes) for job in jobs]
    return Scenario(
        pools=(pool,),
        jobs=tuple(jobs),
        cost=_cost(options),
        policy=options.policy or POLICY,
        faults=_faults(options.faults),
        seed=options.seed or 0,
        until=until,
        warmup=min(longest, until / 10),
    )


def _say_which(found: Sequence[Profile]) -> None:
    """One lock is played here, so one pool of each job."""
    several = [
        f"{one.name} ({one.pools[0].label}, not {', '.join(pool.label for pool in one.pools[1:])})"
        for one in found
        if len(one.pools) > 1
    ]
    if several:
        told = ", ".join(several[:8]) + (f" and {len(several) - 8} more" if len(several) > 8 else "")
        note(f"of jobs with several pools the first is played: {told}; a --scenario can have all")


def profiles(names: Sequence[str], staleness: float | None) -> list[Profile]:
    """Of files, and of jobs written as ``NAME=ON/OFF`` (seconds)."""
    read = ReadOptions(staleness=staleness)
    given = [name for name in names if _is_given(name)]
    found = read_all([Path(name) for name in names if not _is_given(name)], read, note=note)
    return [*found, *(_given(text, read) for text in given)]


def _is_given(text: str) -> bool:
    return "=" in text and "/" in text.partition("=")[2] and not Path(text).exists()


def _given(text: str, read: ReadOptions) -> Profile:
    name, _, times = text.partition("=")
    on, _, off = times.partition("/")
    try:
        busy, idle = float(on), float(off)
        check_name("job", name)
    except ValueError as error:
        raise ConfigError(f"{text!r}: write NAME=ON/OFF in seconds, as in math=120/220 ({error})") from None
    if not (0 < busy < math.inf and 0 <= idle < math.inf):
        raise ConfigError(f"{text!r}: ON is above 0 s and OFF is not below")
    return given_profile(name, busy=busy, period=busy + idle, options=read)


def _step_s(job: Job) -> float:
    count = max(len(job.loop), len(job.produce))
    return alone(job, count).ends[-1] / count


def _cost(options: SimulateOptions) -> SwapCost:
    base, overlap = whole_swap(options.swap_s or 0.0), options.overlap or 0.0
    if not 0 <= overlap <= 1:
        raise ConfigError(f"--overlap {overlap}: a share from 0 to 1")
    rate = float(parse_size(options.bandwidth)) if options.bandwidth else math.inf
    if rate <= 0:
        raise ConfigError("--bandwidth 0: bytes a second, as in 20GiB")
    return msgspec.structs.replace(base, out_rate=rate, in_rate=rate, overlap=overlap)


def _faults(words: Sequence[str]) -> Faults:
    known = dict.fromkeys(Faults.__struct_fields__, float)
    values: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"--fault {word!r}: known are {', '.join(known)}, as in crashes=0.5")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--fault {word!r}: {value!r} is not a number") from None
        within(f"--fault {name}", values[name], most=MOST_FAULTS.get(name, LONGEST))
    return Faults(**values)


def _read_scenario(path: Path, options: SimulateOptions) -> Scenario:
    said = {
        "--swap-s": options.swap_s, "--bandwidth": options.bandwidth, "--overlap": options.overlap,
        "--device": options.device, "--host": options.host, "--staleness": options.staleness,
        "--fault": options.faults or None, "--declared": options.declared or None,
    }  # fmt: skip
    if given := [option for option, value in said.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)}: with --scenario that is said in the file")
    found = read_scenario(path)
    until = found.until if options.hours is None else options.hours * 3600
    if until and found.warmup >= until:
        raise ConfigError(f"--hours {options.hours:g}: the scenario's warmup takes {found.warmup:g} s")
    if options.policy or options.compare:
        _check_heard(found)
    seed = found.seed if options.seed is None else options.seed
    return msgspec.structs.replace(found, until=until, seed=seed, policy=options.policy or found.policy)


def _check_heard(scenario: Scenario) -> None:
    """A policy of the command line is that of the groups which name none."""
    own = [f"{pool.name} ({pool.policy})" for pool in scenario.pools if pool.policy]
    if len(own) == len(scenario.pools):
        raise ConfigError(
            f"--policy, --compare: every pool has one of its own in the file, {', '.join(own)}: "
            "take it out there"
        )
    if own:
        note(f"these pools keep the policy that the file gives them: {', '.join(own)}")


# ── what is said ───────────────────────────────────────────────────────────


def _print(report: Report) -> None:
    if 0 < len(report.jobs) <= 40:
        table = Table(box=None, pad_edge=False)
        for column in ("job", "steps", "alone", "sharing", "slowdown", "worst 10", "wait p50", "p90", "max"):
            table.add_column(column, justify="left" if column == "job" else "right")
        for name, job in report.jobs.items():
            table.add_row(
                name,
                str(job.steps),
                f"{job.solo_step_s:.1f} s",
                f"{job.step_s:.1f} s",
                f"{job.slowdown:.3f}",
                f"{job.worst10:.2f}",
                *(f"{value:.1f} s" for value in (job.wait.p50, job.wait.p90, job.wait.max)),
            )
        console.print(table)
    elif report.jobs:
        spread = report.slowdown_spread
        console.print(
            f"{len(report.jobs)} jobs: slowdown mean {spread.mean:.3f}, p50 {spread.p50:.3f}, "
            f"p90 {spread.p90:.3f}, p99 {spread.p99:.3f}, max {spread.max:.2f}"
        )
    console.print(
        f"useful duty {100 * report.useful_duty:.1f} % of a bound of {100 * report.duty_bound:.1f} %; "
        f"{report.swaps} swaps take {100 * _swap_duty(report):.1f} %; policy {report.policy}"
    )
    if not report.jobs:
        console.print("no job finished a whole step in that time")
        return
    saved = 1 - report.gpu_hours_per_step / (report.gpu_hours_per_step_solo or math.inf)
    console.print(
        f"GPU-hours per step: {report.gpu_hours_per_step:.3f}, and {report.gpu_hours_per_step_solo:.3f} with "
        f"accelerators for each ({100 * saved:.0f} % saved)"
    )
    console.print(
        f"[dim]{report.window_s / 3600:.1f} h in {report.seconds:.2f} s: "
        f"{report.steps_per_s:,.0f} core steps a second in {report.processes} process(es)[/dim]"
    )


def comparison(reports: Sequence[Report]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (
        "policy",
        "useful duty",
        "of bound",
        "slowdown",
        "worst job",
        "wait p90",
        "max",
        "swaps",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for report in reports:
        table.add_row(
            report.policy,
            f"{100 * report.useful_duty:.1f} %",
            f"{100 * report.useful_duty / report.duty_bound:.1f} %" if report.duty_bound else "–",
            f"{report.slowdown_spread.mean:.3f}",
            f"{report.slowdown_spread.max:.3f}",
            f"{report.wait_s.p90:.1f} s",
            f"{report.wait_s.max:.1f} s",
            str(report.swaps),
        )
    return table


def _swap_duty(report: Report) -> float:
    return sum(pool.swap_duty for pool in report.groups.values()) / max(1, len(report.groups))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
