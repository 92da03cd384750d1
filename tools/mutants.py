"""Put classic defects back into the core, one at a time: chaos or exploration alone must find each.

Works on a copy of the package in a temporary folder. The invariants are not touched, no other test is run.
Prints who found it, how soon, and what was seen; the exit status is 1 if one goes unnoticed, or if a defect
is reported of the core as it is. Called by ``make mutants``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 150
"""So many seeds of chaos at most for each defect; the first that fails is enough."""

CHAOS = f"""
import json, sys
from coslice.proof.chaos import run_seed
for seed in range({SEEDS}):
    outcome = run_seed(seed)
    if outcome.violation:
        print(json.dumps(["seed " + str(seed), outcome.violation])); sys.exit(1)
"""
EXPLORE = """
import json, sys
world = dict(nodes=2, jobs=2, acquires=2, **WORLD)
from coslice.proof.explored import Budget, Explored
from coslice.proof.explore import Explorer
class Found(Exception):
    pass
def look(figures, waiting):
    if figures.violations:
        raise Found
start = Explored.begin(**world, budget=Budget(together=1))
explorer = Explorer(start, progress=look, every=50)
try:
    explorer.run()
except Found:
    pass
figures = explorer.figures
if figures.violations or figures.stuck_states:
    story = figures.stories[0]
    print(json.dumps([f"{figures.states} states, {len(story) - 1} steps away", story[-1]])); sys.exit(1)
"""


class Mutant(Struct, frozen=True):
    name: str
    edits: tuple[tuple[str, str, str], ...]
    """Module of the core, what is there, what takes its place. Each must be there exactly once."""
    world: str = "{}"
    """What exploration is to be about, beside the usual."""


ENDED = "    if record is None:\n        return\n    job = record.job\n"
FOLLOW = "    if node in swap.pending:\n        if attached:\n            _command(turn, swap, (node,))\n"
FAILED = "    place = replace(place, reason=reason, touched="
PRETEND = """\
    if not (busy or no_room):
        from coslice.core.holdings import Saved

        members = tuple(replace(m, parked=True) for m in context.members)
        return turn.put(replace(context, members=members, place=Saved(bytes=context.bytes)))
"""

MUTANTS = (
    Mutant(
        "ghost waiter: a call that was given up stays in the queue",
        (("group", "kept = (without(w) for w in group.waiters)", "kept = iter(group.waiters)"),),
    ),
    Mutant(
        "grant before every node has reported",
        (
            (
                "swap",
                "if type(swap) is not Swapping or swap.pending:",
                "if type(swap) is not Swapping:",
            ),
        ),
    ),
    Mutant(
        "anyone may yield",
        (
            (
                "lease",
                "    held = lease_with(turn.group, event.job)\n    record",
                "    on = turn.group.occupancy\n    held = on if isinstance(on, Held) else None\n    record",
            ),
            (
                "lease",
                "mine = holder.session == event.session and holder.epoch == event.epoch",
                "mine = True",
            ),
        ),
    ),
    Mutant(
        "no lease: a dead holder keeps the lock",
        (
            (
                "sessions",
                ENDED,
                "    if tell:\n"
                "        rest = tuple(s for s in turn.group.lost if s.session != session)\n"
                "        turn.set(lost=rest)\n"
                "        return\n" + ENDED,
            ),
        ),
    ),
    Mutant(
        "operations get random ids",
        (("ids", 'OpId(f"{group}/{epoch}/{node}")', 'OpId(f"{group}/{epoch}/{node}/{id(object())}")'),),
    ),
    Mutant("a restart forgets the swap", (("swap", FOLLOW, "    if node in swap.pending:\n"),)),
    Mutant(
        "a repeated request is queued twice",
        (("group", "            if ask.request == event.request:", "            if False:"),),
    ),
    Mutant("restore after a failed snapshot", (("node_leaving", FAILED, PRETEND + FAILED),)),
    Mutant(
        "stale residency: the last word of an agent is trusted, whatever happened since",
        (
            (
                "swap",
                "if not view.attached or view.outstanding or (last is not None and last != job):",
                "if not view.attached:",
            ),
        ),
    ),
    Mutant(
        "a job frozen in the middle of a phase computes on, where there is room beside the next",
        (("node_swap", "if c.job in op.freeze), None)", "if False), None)"),),
        world="{'whole': True, 'need': 30 << 20}",
    ),
    Mutant(
        "a drained node is granted all the same",
        (
            ("group_state", " and not held_up(group, w.job)\n    )", "\n    )"),
            ("swap", "(drained := held_up(group, swap.incoming))", "(drained := ())"),
        ),
    ),
)


def main() -> int:
    missed = 0
    looks = _look(Mutant("", ()))
    print(f"the core as it is: {_verdict(looks)}", flush=True)
    missed += any(found is not None for _, found, _ in looks)
    for mutant in MUTANTS:
        looks = _look(mutant)
        missed += all(found is None for _, found, _ in looks)
        print(f"{mutant.name}: {_verdict(looks)}", flush=True)
    print("every defect was found" if not missed else f"{missed} WRONG")
    return 1 if missed else 0


STALE = ("AttributeError:", "ImportError:", "NameError:")
"""What a defect is found by that speaks of what the core no longer has: nothing is proven."""
Look = tuple[str, list[str] | None, float]
"""By whom, where and what, after how many seconds."""


def _look(mutant: Mutant) -> list[Look]:
    with tempfile.TemporaryDirectory(prefix="coslice-mutant-") as folder:
        source = Path(folder) / "coslice"
        shutil.copytree(ROOT / "src" / "coslice", source, ignore=shutil.ignore_patterns("__pycache__"))
        for module, old, new in mutant.edits:
            path = source / "core" / f"{module}.py"
            text = path.read_text()
            if text.count(old) != 1:
                raise SystemExit(f"{path.name} has {text.count(old)} times what a defect replaces: {old!r}")
            path.write_text(text.replace(old, new))
        explore = EXPLORE.replace("WORLD", mutant.world)
        return [_run(name, code, folder) for name, code in (("chaos", CHAOS), ("explore", explore))]


def _run(name: str, code: str, folder: str) -> Look:
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    lines = ended.stdout.splitlines()
    if ended.returncode == 0:
        return name, None, seconds
    if not lines:
        raise SystemExit(f"{name} itself broke:\n{ended.stderr}")
    found = json.loads(lines[-1])
    if found[1].startswith(STALE):
        raise SystemExit(f"this defect no longer fits the core and only crashes it: {found[1]}")
    return name, found, seconds


def _verdict(looks: list[Look]) -> str:
    parts = []
    for name, found, seconds in looks:
        if found is None:
            parts.append(f"\n    {name:<8} {seconds:6.1f} s  found nothing")
        else:
            parts.append(f"\n    {name:<8} {seconds:6.1f} s  {found[0]}: {found[1][:150]}")
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
