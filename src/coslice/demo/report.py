"""What the demo says at its end: the jobs, the figures against their targets, and where to look on."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from coslice.demo.calibration import DUTY
from coslice.demo.figures import DISTURBED
from coslice.demo.view import sparkline
from coslice.sizes import format_size

if TYPE_CHECKING:
    from coslice.demo.runner import Result


def print_report(console: Console, result: "Result") -> None:
    console.print()
    console.print(_jobs(result))
    console.print(_figures(result))
    figures = result.figures
    targets = figures.targets()
    missed = [target for target in targets if not target.met]
    if missed:
        which = "; ".join(f"{target.name} {target.value} (wanted {target.wanted})" for target in missed)
        console.print(f"[bold red]{len(missed)} of {len(targets)} targets missed[/]: {which}")
    else:
        console.print(f"[bold green]all {len(targets)} targets met[/]")
    if figures.taken_by_others > DISTURBED:
        console.print(
            "[yellow]other processes kept the accelerator's core busy for up to "
            f"{figures.taken_by_others:.0%} of a block: duty and slowdown are theirs as much as ours; "
            "run it again on an idle machine[/]"
        )
    _fine_print(console, result)


def _jobs(result: "Result") -> Table:
    figures = result.figures
    table = Table(title="Each job, alone → sharing", title_justify="left")
    for column in ("job", "task", "step", "slowdown", "reward", "parameters"):
        table.add_column(column, no_wrap=True)
    for plan in result.plans:
        job, last = plan.name, figures.rounds[-1]
        rewards = last.shared.runs[job].rewards
        digest = figures.runs(job)[-1].digest[:8]
        table.add_row(
            job,
            plan.task,
            f"{figures.solo_step(job, last):.2f} → {figures.shared_step(job, last):.2f} s",
            f"{figures.slowdown[job]:.3f}×",
            f"{sparkline(rewards)} {rewards[-1]:.2f}",
            f"[green]{digest} same[/]" if figures.identical(job) else "[bold red]DIFFERENT[/]",
        )
    return table


def _figures(result: "Result") -> Table:
    figures = result.figures
    table = Table(title="The accelerator", title_justify="left")
    for column in ("measured", "value", "target", ""):
        table.add_column(column)
    for target in figures.targets():
        table.add_row(
            target.name, target.value, target.wanted, "[green]met[/]" if target.met else "[bold red]missed[/]"
        )
    table.add_section()
    saved = figures.solo_wall_s - figures.shared_wall_s
    table.add_row("held duty shared", f"{figures.held_duty:.1%}", "", "")
    table.add_row("bytes moved", format_size(figures.bytes_moved), "", "")
    table.add_row(
        "wall time alone → together",
        f"{figures.solo_wall_s:.1f} s → {figures.shared_wall_s:.1f} s",
        "", f"saves {saved / figures.solo_wall_s:.0%}",
    )  # fmt: skip
    return table


def _fine_print(console: Console, result: "Result") -> None:
    figures, calibration = result.figures, result.calibration
    if not figures.swaps:
        for reason in figures.unmoved_because:
            console.print(f"nothing was moved, because: {reason}")
    console.print(
        "[dim]How: useful duty is the smaller of two accounts by the kernel, of the accelerator's "
        "core and of the threads inside accelerator sections, over the wall time in which all jobs are past "
        "their first two steps; swaps do not count. Calibrated before the blocks: a section takes "
        f"{calibration.section_s:.2f} s here ({calibration.questions} questions × 16 answers), so each "
        f"verifier checks {calibration.rate:.0f} answers/s, which aims at {DUTY:.0%} busy duty alone. A job "
        f"keeps {format_size(calibration.state_bytes)} of state and takes up to "
        f"{format_size(calibration.need_bytes)} while it computes; the device has "
        f"{format_size(figures.budget)}. {len(figures.rounds)} round(s), {result.seconds:.0f} s in all.[/]"
    )
    console.print(f"replay:  [bold]{result.replay}[/]   (open it in a browser)\njournal: {result.journal}")
