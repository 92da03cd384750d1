"""``coslice explore``: every order of events of a small world, and what it was made of.

Prints the alphabet and the bounds first: an exhaustive search says only as much as its alphabet.
"""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coslice.proof.alphabet import LETTERS
from coslice.proof.explore import Explorer, Figures
from coslice.proof.explored import KINDS, Budget, Explored

PAIRS = ("crashes", "failures")
"""What may strike together in one run, if two troubles may."""
console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)


def run_explore(
    *,
    nodes: int,
    jobs: int,
    out: Path | None,
    acquires: int = 2,
    troubles: int = 1,
    whole: bool = False,
    seconds: float = float("inf"),
) -> int:
    """The exit status: 0, 1 if a state is wrong or stuck, 2 if the search did not end, 130 if interrupted."""
    budget = Budget(together=troubles, pairs=PAIRS)
    kind = ", which can be frozen in a phase" if whole else ""
    console.print(
        f"{nodes} nodes, {jobs} jobs{kind}, {acquires} acquires each. In one run: {_bounds(budget)}"
    )
    explorer = Explorer(
        Explored.begin(nodes=nodes, jobs=jobs, acquires=acquires, budget=budget, whole=whole),
        seconds=seconds,
        progress=_progress,
    )
    interrupted = False
    try:
        explorer.run()
    except KeyboardInterrupt:
        interrupted = True
    figures = explorer.figures
    _print(figures)
    if out is not None:
        found = {**_as_json(figures, nodes, jobs, acquires, budget), "whole": whole}
        out.write_text(json.dumps(found, indent=1) + "\n")
    if interrupted:
        return 130
    if figures.violations or figures.stuck_states:
        return 1
    return 0 if figures.complete else 2


def _bounds(budget: Budget) -> str:
    if budget.together < 1:
        return "no trouble"
    one = f"one of {', '.join(KINDS)}"
    return one if budget.together == 1 else f"{one}; or {budget.together} of {' and '.join(budget.pairs)}"


def _progress(figures: Figures, waiting: int) -> None:
    errors.print(
        f"{figures.states:,} states, {figures.edges:,} steps, depth {figures.depth}, {waiting:,} to go, "
        f"{figures.seconds:.0f} s",
        end="\r" if errors.is_terminal else "\n",
    )


def _as_json(figures: Figures, nodes: int, jobs: int, acquires: int, budget: Budget) -> dict[str, object]:
    return {
        "nodes": nodes,
        "jobs": jobs,
        "acquires": acquires,
        "states": figures.states,
        "complete": figures.complete,
        "violations": figures.violations,
        "stuck_states": figures.stuck_states,
        "alphabet": {letter: figures.letters.get(letter, 0) for letter in LETTERS},
        "budget": _bounds(budget),
        "edges": figures.edges,
        "depth": figures.depth,
        "waiting_states": figures.waiting_states,
        "seconds": round(figures.seconds, 1),
    }


def _print(figures: Figures) -> None:
    for story in figures.stories:
        console.print("\nthe shortest way to a broken state:", *[f"  {step}" for step in story], sep="\n")
    table = Table("letter", "steps", title="Alphabet", title_justify="left")
    for letter in LETTERS:
        table.add_row(letter, f"{figures.letters.get(letter, 0):,}")
    console.print(table)
    state = "complete" if figures.complete else "NOT complete (so what is reachable is not known)"
    console.print(
        f"{state}: {figures.states:,} states ({figures.waiting_states:,} with a waiter), "
        f"{figures.edges:,} steps, {figures.violations} violations, {figures.stuck_states} stuck states, "
        f"{figures.seconds:.0f} s"
    )
