"""The table of docs/planning.md on drift: sets that keep their bound, until one job's phases grow by half.

    python tools/drift_table.py TRACES… [--swap-s 10] [--sets 60] > table.md

Sets of two and three jobs, recorded and drawn from a seed, that an outlook lets share within the bound. In
the middle of the simulation one job's phases (all, those on the accelerators, those off) take 1.5 times as
long. With ``--admission`` off nobody minds; with enforce the group is planned anew. A figure is the share of
rolling means over ten steps within the bound, from the verdict on the drift on; without enforce, from the
drift on."""

import argparse
import random
import sys
from collections import defaultdict
from pathlib import Path

from msgspec.structs import replace

from coslice.admission.model import Code, Rules
from coslice.admission.outlook import Player, outlook, overloaded
from coslice.admission.simulated import Admission, AdmissionReport
from coslice.core.ids import JobId
from coslice.profile.model import Phase, Profile, durations, make_pool
from coslice.profile.read import read_all
from coslice.simulate.from_profile import job_of
from coslice.simulate.report import Report
from coslice.simulate.run import simulate
from coslice.simulate.spec import Drift, Pool, Scenario, whole_swap

STEPS = 100
"""Before the drift, and after it: cycles of the slowest job."""


def drawn(dice: random.Random, number: int, *, steady: float) -> Profile:
    period, duty = dice.uniform(150, 700), dice.uniform(0.05, 0.45)
    staleness = dice.choice((0.0, 0.0, 1.0, 4.0))

    def part(mean: float) -> list[float]:
        return [max(0.01, mean * dice.gauss(1, steady)) for _ in range(32)]

    coupling = "buffered" if staleness else "closed"
    gen = Phase(
        name="gen", on=False, duration=durations(part(period * (1 - duty))), coupling=coupling,
        staleness=staleness,
    )  # fmt: skip
    train = Phase(name="train", phase="train", on=True, duration=durations(part(period * duty)))
    return Profile(name=f"drawn-{number}", pools=(make_pool("trainer", [gen, train]),))


def sets(profiles: list[Profile], args: argparse.Namespace) -> list[list[Profile]]:
    """Sets that keep the bound as they are, and are not trivially below it."""
    dice = random.Random(args.seed)
    found: list[list[Profile]] = []
    tried = 0
    while len(found) < args.sets and tried < 40 * args.sets:
        tried += 1
        some = [
            dice.choice(profiles)
            if profiles and dice.random() < 0.3
            else drawn(dice, tried * 10 + k, steady=dice.choice((0.02, 0.1)))
            for k in range(dice.choice((2, 2, 3)))
        ]
        if len({profile.name for profile in some}) < len(some):
            continue
        players = [
            Player(job=JobId(profile.name), profile=profile, bound=args.max_slowdown) for profile in some
        ]
        if not overloaded(players) and outlook(players, policy="fair_share", swap_s=args.swap_s).fits(
            players
        ):
            found.append(some)
    return found


def play(
    some: list[Profile], mode: str, part: str, args: argparse.Namespace
) -> tuple[AdmissionReport, Report, float]:
    jobs = [job_of(profile) for profile in some]
    longest = max(profile.pools[0].period.mean for profile in some)
    at = STEPS * longest
    jobs[0] = replace(jobs[0], drift=(Drift(at, args.factor, part),))
    gate = Admission(
        Rules(mode=mode, max_slowdown=args.max_slowdown), declared={profile.name: profile for profile in some}
    )
    told = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=tuple(jobs),
            cost=whole_swap(args.swap_s),
            policy="fair_share",
            until=2 * at,
            warmup=2 * longest,
        ),
        gate=gate,
    )
    return gate.report(), told, at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--swap-s", type=float, default=10.0)
    parser.add_argument("--max-slowdown", type=float, default=1.10)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--sets", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    profiles = read_all(args.traces, note=print) if args.traces else []
    chosen = sets(profiles, args)
    print(f"{len(chosen)} sets, bound {args.max_slowdown:g}, swaps of {args.swap_s:g} s, x {args.factor:g}\n")
    print("| what grows | admission | within the bound | of rolling means | worst set | sets changed: policy,"
          " queued, refused | useful duty |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for part in ("all", "on", "off"):
        for mode in ("warn", "enforce"):
            kept = windows = 0.0
            worst, useful = 1.0, 0.0
            what: dict[str, int] = defaultdict(int)
            for some in chosen:
                admission, told, _ = play(some, mode, part, args)
                kept += admission.within * admission.windows
                windows += admission.windows
                if admission.within < worst:
                    worst = admission.within
                    print(f"  {mode} {part} {[p.name for p in some]} {admission.within:.3f}", file=sys.stderr)
                useful += told.useful_duty / len(chosen)
                after = [one.code for one in admission.decisions if one.at >= admission.replanned_at > 0]
                for code in (Code.REORDERED, Code.QUEUED, Code.EVICTED):
                    what[code] += code in after
            changed = ", ".join(str(what[code]) for code in (Code.REORDERED, Code.QUEUED, Code.EVICTED))
            print(
                f"| {part} | {mode} | {kept / max(1, windows):.2%} | {windows:.0f} | {worst:.1%} | {changed} "
                f"| {useful:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
