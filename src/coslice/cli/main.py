"""The ``coslice`` command. Each sub-command imports what it needs only when it runs."""

import errno
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coslice.cli import (
    admin,
    bench_commands,
    doctor,
    move,
    proof_commands,
    security,
    serve_commands,
    simulate_commands,
)
from coslice.cli.drain import drain
from coslice.cli.plan import plan
from coslice.cli.profile import profile
from coslice.cli.serve_commands import DEFAULT_AGENT, DEFAULT_ORCHESTRATOR, Json, Orchestrator
from coslice.cli.store import store_app
from coslice.errors import ConfigError, CosliceError
from coslice.security import redact

app = typer.Typer(
    name="coslice",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Let independent RL training jobs share the same accelerators by taking turns.\n\n"
        "Start here:  [b]coslice demo[/b]   two real jobs, alone and then together on one accelerator.\n\n"
        "Your own jobs:  [b]coslice up[/b] in one terminal, then in two others\n"
        "[b]coslice run --job a -- python train_a.py[/b] and the same for b; "
        "[b]coslice status[/b] shows who runs."
    ),
)
app.add_typer(store_app, name="store")
app.command()(profile)
app.command()(plan)

proof_commands.add(app)
simulate_commands.add(app, bench_commands.add(app))
security.add(app)
move.add(app)
doctor.add(app)
admin.add(app)
app.command()(drain)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coslice {importlib.metadata.version('coslice')}")
        raise typer.Exit


@app.callback()
def coslice(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


serve_commands.add(app)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    job: Annotated[str, typer.Option("--job", "-j", help="Name of the job: one name, one running training.")],
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="Group (or several, comma-separated) whose accelerators it uses."),
    ] = None,
    need: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Device memory the job needs; without it the first turn evicts all others."
        ),
    ] = None,
    world: Annotated[
        int,
        typer.Option(
            help="Processes that share a lease; it ends when all have yielded. 0: whoever took part."
        ),
    ] = 0,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME[:key=value]",
            help="What moves its state; [b]cuda[/b] needs no code for it. Default: what the job registers.",
        ),
    ] = "",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="The command is (or starts) a vLLM or SGLang server that answers here: its memory moves "
            "over HTTP. Repeat for several.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the job will do: a profile, or any file that [b]coslice profile[/b] reads. Admission "
            "judges it at the door then, and not after a few of its steps.",
        ),
    ] = None,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    agent: Annotated[
        str,
        typer.Option("--agent", envvar="COSLICE_AGENT", metavar="HOST:PORT", help="The agent of this node."),
    ] = DEFAULT_AGENT,
) -> None:
    """Run a training command as a job: [b]coslice run --job a -- python train.py[/b]"""
    # Read when gRPC is loaded. Its handlers would start its threads anew in the child that is to become the
    # command, whose files are closed before: the threads then end it by SIGABRT.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from coslice.cli.run import RunOptions, backend_of, run_job

    options = RunOptions(
        environment=_outside(context),
        job=job,
        group=group,
        need=need,
        world=world,
        orchestrator=orchestrator,
        agent=agent,
        command=tuple(context.args),
        backend=backend_of(backend, endpoint or ()),
        profile=profile,
    )
    raise typer.Exit(run_job(options))


@app.command()
def status(
    group: Annotated[str, typer.Argument(help="One group; all if left out.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep it on screen, updated as it changes.")
    ] = False,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Json = False,
) -> None:
    """Who runs, who waits, and what is where."""
    from coslice.cli.show import show_status

    show_status(group, address=orchestrator, watch=watch, as_json=json)


@app.command()
def top(
    group: Annotated[str, typer.Argument(help="One group; all if left out.")] = "",
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each change; with --once: one.")
    ] = False,
) -> None:
    """All groups on one screen, live: locks, queues, who held what in the last minute, each job's story.

    Keys: arrows or j and k choose, Tab goes to the jobs, / filters, s sorts, Space stands still, q ends.
    Needs [b]pip install 'coslice\\[top]'[/b]; --once and --json do without.
    """
    from coslice.cli.top import top as show

    show(group, address=orchestrator, once=once, as_json=json)


@app.command()
def explain(
    group: Annotated[str, typer.Argument(help="The group to explain.")],
    job: Annotated[str, typer.Option("--job", "-j", help="Only what concerns this job.")] = "",
    last: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many decisions to show.")] = 20,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Json = False,
) -> None:
    """Why does a job wait? The group's recent decisions, in prose."""
    from coslice.cli.show import show_explain

    show_explain(group, job=job, last=last, address=orchestrator, as_json=json)


@app.command()
def demo(
    jobs: Annotated[int, typer.Option(min=2, max=4, help="How many jobs share the accelerator.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Device memory. Default: room for one job only, measured first."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of solo and shared blocks.")] = 2,
    steps: Annotated[int | None, typer.Option(min=4, help="Training steps per block.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: shows the machinery, proves less.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of data, models and sampling.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where journal and replay page go.")] = Path(
        "coslice-demo"
    ),
) -> None:
    """The main job: two real GRPO trainings, alone and then together on one accelerator."""
    from coslice.demo.runner import DemoOptions, main

    options = DemoOptions(
        jobs=jobs,
        memory=memory,
        rounds=rounds,
        steps=steps,
        quick=quick,
        seed=seed,
        json=str(json) if json else None,
        out=str(out),
    )
    raise typer.Exit(main(options))


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="A journal written by [b]coslice up[/b] or the demo.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page to write. Default: replay.html."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing."),
    ] = None,
) -> None:
    """Draw a journal as one self-contained HTML page, or as a Perfetto trace."""
    from coslice.cli.show import write_replay

    write_replay(journal, out, perfetto)


@app.command(name="check-phases", context_settings={"allow_interspersed_args": False})
def check_phases(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="The job's command, after `--`.", metavar="COMMAND…")],
    group: Annotated[
        str, typer.Option("--group", help="Groups in the order they must be taken, the trainer's first.")
    ] = "trainer,sampler",
    swap_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a swap takes: shorter phases are reported.")
    ] = 1.0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write phases and findings as JSON.")
    ] = None,
) -> None:
    """Run a job alone, without a cluster, and report what its phases would do to others.

    Reports, with phase and line: groups taken in the wrong order, accelerators never given up, yields of what
    is not held, work of registered state outside a phase, phases too short to be worth a swap. Status 1 if
    there is anything, or no phase at all; the command's own if it failed.
    """
    from coslice.cli.check_phases import check_phases as check
    from coslice.client.config import group_names

    names = group_names(group)
    if not names:
        raise ConfigError("--group names no group")
    raise typer.Exit(check(command, environment=_outside(context), groups=names, swap_s=swap_s, out=json))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Entry point: an error of ours is one line on standard error, never a traceback."""
    outside = dict(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core prints what we say better
    redact.set_up()
    try:
        try:
            app(obj=outside)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConfigError as error:
        _fail(error, 2)
    except CosliceError as error:
        _fail(error, 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to be said has no place either
        _fail(CosliceError(f"cannot write the answer: {error.strerror}"), 1)


def _outside(context: typer.Context) -> dict[str, str]:
    """The environment as the user had it: what we set for ourselves is no business of a command of theirs."""
    found: dict[str, str] = context.obj
    return found


def _fail(error: CosliceError, code: int) -> None:
    print(f"coslice: {redact.redact(str(error))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
