"""``coslice profile``: what a job's log says about sharing, on one screen, and the profile as a file."""

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coslice.cli.finite import within
from coslice.errors import ConfigError
from coslice.profile.number import MOST_ACCELERATORS

if TYPE_CHECKING:
    from coslice.profile.figures import PoolFigures
    from coslice.profile.model import Pool, Profile
    from coslice.profile.options import ReadOptions

SHOWN = 0.001
"""Phases shorter than this share of a cycle are counted, not listed."""


def profile(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…",
            help="Journals, veRL logs, trainer_state.json, step files, GPU-utilisation CSVs, profiles; or "
            "folders of them.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the profile; for several, a folder. FILE/ is one, too."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - prints them.")
    ] = None,
    swap_s: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds that one change of hands costs.")
    ] = 10.0,
    name: Annotated[str, typer.Option(help="Name of the job. Default: from the file's name.")] = "",
    staleness: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="N",
            help="Batches that may wait for the trainer (0: on-policy). Default: what the file says.",
        ),
    ] = None,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Generation runs on the trainer's accelerators.")
    ] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Generation runs on accelerators of its own.")
    ] = False,
    accelerators: Annotated[
        int, typer.Option(min=0, max=MOST_ACCELERATORS, metavar="N", help="How many the pool has.")
    ] = 0,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU=ROLE", help="Utilisation: 0=trainer, 1=sampler; repeat for each."),
    ] = None,
    busy_above: Annotated[
        float, typer.Option(metavar="PCT", help="Utilisation: a sample above this is busy.")
    ] = 5.0,
    join_s: Annotated[
        float, typer.Option(metavar="S", help="Utilisation: idle gaps up to this belong to the busy block.")
    ] = 5.0,
    warmup: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Utilisation: share of the record left out at its start.")
    ] = 0.2,
    interval_s: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Utilisation without time stamps: between samples.")
    ] = 0.0,
    skip_first: Annotated[int, typer.Option(min=0, metavar="N", help="Leave out the first N steps.")] = 0,
    busy: Annotated[
        float | None, typer.Option(metavar="S", help="Without a file: busy so many seconds …")
    ] = None,
    period: Annotated[float | None, typer.Option(metavar="S", help="… of every so many.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Without a file: bytes to move per accelerator.")
    ] = None,
) -> None:
    """How idle are a job's accelerators, in blocks of what size, and what would sharing recover?

    Reads what you already have and writes one profile format for [b]coslice simulate[/b] and
    [b]coslice plan[/b]:

      coslice profile train.log                              a veRL log
      coslice profile trainer_state.json --disaggregated     TRL with a vLLM server of its own
      coslice profile gpus.csv --role 0=trainer --role 1=sampler
      coslice profile journal.jsonl --out profiles/          every job of a running coslice
      coslice profile --busy 281 --period 619 --staleness 8 --name code --out code.json
    """
    from coslice.profile.options import ReadOptions

    if colocated and disaggregated:
        raise ConfigError("--colocated and --disaggregated: a job is one or the other")
    for option, value in (
        ("--swap-s", swap_s),
        ("--staleness", staleness),
        ("--join-s", join_s),
        ("--interval-s", interval_s),
        ("--busy", busy),
        ("--period", period),
    ):
        within(option, value)
    within("--busy-above", busy_above, most=100.0)
    options = ReadOptions(
        shape="colocated" if colocated else "disaggregated" if disaggregated else "auto",
        staleness=staleness,
        accelerators=accelerators,
        roles=_roles(role or []),
        busy_above=busy_above,
        join_s=join_s,
        warmup=warmup,
        interval_s=interval_s,
        skip_first=skip_first,
    )
    profiles = _profiles(files or [], options, name, busy, period, state)
    rows = [_figures(found, swap_s) for found in profiles]
    text = json_module.dumps({"swap_s": swap_s, "profiles": rows}, indent=1)
    if json is not None and str(json) != "-":
        write(json, text.encode() + b"\n")
    if out is not None:
        _write_profiles(out, profiles)
    # Last: whoever reads may leave in the middle, and the files are there then.
    if str(json) == "-":
        print(text)
    else:
        _print(profiles, swap_s)


def _profiles(
    files: list[Path],
    options: "ReadOptions",
    name: str,
    busy: float | None,
    period: float | None,
    state: str | None,
) -> "list[Profile]":
    from msgspec.structs import replace

    from coslice.core.ids import check_name
    from coslice.profile.given import given_profile
    from coslice.profile.read import KNOWN, read_all
    from coslice.sizes import parse_size

    if name:
        try:
            check_name("job", name)
        except ValueError as error:
            raise ConfigError(f"--name: {error}") from None
    if busy is not None or period is not None:
        if files or busy is None or period is None:
            raise ConfigError("--busy and --period go together, and take the place of a file")
        size = parse_size(state) if state else 0
        return [given_profile(name or "given", busy=busy, period=period, options=options, state_bytes=size)]
    if state:
        raise ConfigError("--state goes with --busy and --period: of files, it is what they say")
    if not files:
        raise ConfigError(f"name a file to read ({KNOWN}), or give --busy and --period")
    profiles = read_all(files, options, note=note)
    if name and len(profiles) > 1:
        raise ConfigError(f"--name is for one profile, and these files hold {len(profiles)}")
    return [replace(profiles[0], name=name)] if name else profiles


def _roles(texts: list[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for text in texts:
        device, _, role = text.partition("=")
        if not device or role not in ("trainer", "sampler", "both"):
            raise ConfigError(f"--role {text!r}: write the GPU's index and its role, such as 0=trainer")
        roles[device] = role
    return roles


def note(text: str) -> None:
    """Beside the answer, which may be read by a program."""
    print(f"coslice: {text}", file=sys.stderr)


def write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _write_profiles(name: str, profiles: "list[Profile]") -> None:
    from coslice.profile.model import encode_profile

    out = Path(name)
    folder = out.is_dir() or name.endswith("/") or len(profiles) > 1
    if folder:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {out} as a folder: {error.strerror}") from None
    for profile in profiles:
        write(out / f"{profile.name}.json" if folder else out, encode_profile(profile))


def _figures(profile: "Profile", swap_s: float) -> dict[str, Any]:
    """What ``--json`` says of one profile. ``mean_s`` of a phase: when it takes place."""
    import msgspec

    from coslice.profile.figures import pool_figures

    pools = []
    for pool in profile.pools:
        phases = [
            {
                "name": phase.name,
                "phase": phase.phase,
                "on": phase.on,
                "mean_s": phase.mean,
                "cycle_mean_s": phase.duration.mean,
                "cv": phase.duration.cv,
                "occurs": phase.occurs or phase.duration.count,
                "cycles": phase.duration.count,
            }
            for phase in pool.phases
        ]
        pools.append(
            {
                "pool": pool.label,
                "role": pool.role,
                "accelerators": pool.accelerators,
                "coupling": pool.coupling,
                "staleness": pool.staleness,
                "state_bytes": pool.state_bytes,
                "device_bytes": pool.device_bytes,
                **msgspec.to_builtins(pool_figures(pool, swap_s)),
                "phases": phases,
            }
        )
    return {"name": profile.name, "source": msgspec.to_builtins(profile.source), "pools": pools}


# ── the screen ─────────────────────────────────────────────────────────────


def _print(profiles: "list[Profile]", swap_s: float) -> None:
    from rich.console import Console

    console = Console(highlight=False, emoji=False, soft_wrap=True)
    if len(profiles) == 1:
        for line in _one(profiles[0], swap_s):
            console.print(line)
        return
    for line in _many(profiles, swap_s):
        console.print(line)


def _many(profiles: "list[Profile]", swap_s: float) -> list[str]:
    """A line for each pool; under them, each remark once with the jobs it is about."""
    from rich.markup import escape

    from coslice.profile.figures import pool_figures

    rows = [
        (
            "job",
            "pool",
            "cycle s",
            "busy",
            "idle",
            "block s",
            "off-time",
            f"recovers at {swap_s:g} s",
            "worth it",
        )
    ]
    remarks: dict[str, list[str]] = {}
    for profile in profiles:
        for pool in profile.pools:
            figures = pool_figures(pool, swap_s)
            rows.append(
                (
                    profile.name,
                    pool.label,
                    f"{figures.cycle_s:.4g}",
                    f"{figures.busy:.0%}",
                    f"{figures.idle:.0%}",
                    f"{figures.idle_blocks_s[1]:.4g}",
                    f"buffered {pool.staleness:g}" if pool.coupling == "buffered" else "closed",
                    f"{figures.recovered:.0%}",
                    _verdict_word(pool, figures),
                )
            )
        skipped = [f"left out: {count} {reason}" for reason, count in profile.source.skipped.items()]
        for remark in [*skipped, *profile.source.notes]:
            remarks.setdefault(remark, []).append(profile.name)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in (0, 1, 6, 8) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(escape("  ".join(cells).rstrip()))
    lines[0] = f"[dim]{lines[0]}[/dim]"
    lines += [
        f"[dim]{escape(remark)}[/dim]"
        + (f" [dim]({', '.join(names)})[/dim]" if len(names) < len(profiles) else "")
        for remark, names in remarks.items()
        if not remark.startswith("index.json")
    ]
    return lines


def _one(profile: "Profile", swap_s: float) -> list[str]:
    from rich.markup import escape

    from coslice.profile.figures import pool_figures

    lines = [f"[b]{profile.name}[/b]   {profile.source.kind}, {_lines(profile)}"]
    for pool in profile.pools:
        figures = pool_figures(pool, swap_s)
        low, median, high = figures.idle_blocks_s
        lines += [
            "",
            f"  [b]{pool.label}[/b]   {_facts(pool)}",
            f"    cycle      {figures.cycle_s:.4g} s{_over(pool.period.count)}, "
            f"regularity {figures.regularity:.2f} (1: a clockwork)",
            f"    busy       {figures.busy:.1%}, {pool.busy.mean:.4g} s a cycle",
            f"    idle       [b]{figures.idle:.1%}[/b], in blocks of {median:.4g} s "
            f"(10 % under {low:.4g}, 10 % over {high:.4g}); off-time {_coupling(pool)}",
            f"    phases     {escape(_phases(pool))}",
            f"    recovers   {figures.recovered:.1%} of its time, used by others, with swaps of {swap_s:g} s",
            f"    worth it?  {_verdict(pool, figures)}",
        ]
    if profile.source.notes:
        lines.append("")
        lines += [f"  [dim]{escape(note)}[/dim]" for note in profile.source.notes]
    return lines


def _lines(profile: "Profile") -> str:
    source = profile.source
    if source.kind == "given":
        return "as given"
    skipped = "; ".join(f"{count} {reason}" for reason, count in source.skipped.items())
    return f"{source.used} of {source.read} lines used" + (f" (left out: {skipped})" if skipped else "")


def _facts(pool: "Pool") -> str:
    from coslice.sizes import format_size

    facts: list[str] = [pool.role] if pool.label != pool.role else []
    if pool.accelerators:
        facts.append(f"{pool.accelerators} accelerator{'s' if pool.accelerators > 1 else ''}")
    if pool.state_bytes:
        facts.append(f"state {format_size(pool.state_bytes)} each")
    return ", ".join(facts)


def _over(cycles: int) -> str:
    return f", mean of {cycles} cycles" if cycles > 1 else ""


def _coupling(pool: "Pool") -> str:
    if pool.coupling == "closed":
        return "closed"
    return f"buffered ({pool.staleness:g} batch{'es' if pool.staleness != 1 else ''} ahead)"


def _phases(pool: "Pool") -> str:
    shown, rest = [], 0
    for phase in pool.phases:
        if phase.duration.mean < SHOWN * pool.period.mean:
            rest += 1
            continue
        often = phase.occurs and phase.occurs < phase.duration.count
        where = f" in {phase.occurs} of {phase.duration.count}" if often else ""
        shown.append(f"{phase.name} {phase.mean:.4g} s {'on' if phase.on else 'off'}{where}")
    return " · ".join(shown) + (f" · {rest} more under 0.1 %" if rest else "")


def _nothing_known(pool: "Pool") -> bool:
    """How long a step takes, and not one of its phases."""
    return all(phase.name == "other" for phase in pool.phases)


def _verdict_word(pool: "Pool", figures: "PoolFigures") -> str:
    if figures.worth:
        return "yes"
    if _nothing_known(pool):
        return "not known"
    return f"under {figures.break_even_s:.2g} s" if figures.break_even_s else "no"


def _verdict(pool: "Pool", figures: "PoolFigures") -> str:
    if figures.worth:
        return f"[green]yes[/green], up to swaps of {figures.break_even_s:.3g} s"
    if _nothing_known(pool):
        return "[yellow]not known[/yellow]: the file does not say what is idle in a step"
    if figures.break_even_s:
        return (
            f"[yellow]not with swaps of {figures.swap_s:g} s[/yellow]: from {figures.break_even_s:.2g} s down"
        )
    return "[red]no[/red]: less than a tenth is idle, whatever a swap costs"
