"""The table of docs/policies.md: every policy on pairs and triples of recorded jobs, simulated.

    python tools/policy_table.py TRACES… [--swap-s 10] [--triples 100] > table.md

A figure of merit for each set of jobs that share one group: useful duty as a share of its bound, and each
job's slowdown as a multiple of the fair one, max(1, Σ duty alone). Sets are told apart by whether they fit:
Σ duty at most 0.95, or more.
"""

import argparse
import itertools
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from msgspec import Struct

from coslice.core.policy import NAMES
from coslice.profile.read import read_all
from coslice.simulate.from_profile import job_of
from coslice.simulate.report import Report, spread
from coslice.simulate.run import simulate
from coslice.simulate.solo import alone
from coslice.simulate.spec import Job, Pool, Scenario, whole_swap
from coslice.tied import tie

FITS = 0.95


class Told(Struct, frozen=True):
    policy: str
    load: float
    of_bound: float
    slowdowns: tuple[float, ...]
    """÷ max(1, Σ duty)."""
    swap_duty: float
    longest_wait: float
    """In mean steps of the job that waited."""


def one(jobs: tuple[Job, ...], policy: str, swap_s: float, steps: int) -> Told:
    count = max(len(job.loop) for job in jobs)
    longest = max(alone(job, count).ends[-1] / count for job in jobs)
    load = sum(max(alone(job, count).duty.values()) for job in jobs)
    report: Report = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=jobs,
            cost=whole_swap(swap_s),
            policy=policy,
            until=(steps + 2) * longest,
            warmup=2 * longest,
        )
    )
    fair = max(1.0, load)
    return Told(
        policy,
        load,
        report.useful_duty / report.duty_bound,
        tuple(job.slowdown / fair for job in report.jobs.values()),
        report.groups["pool"].swap_duty,
        max(job.wait.max / job.solo_step_s for job in report.jobs.values()),
    )


def row(policy: str, told: list[Told]) -> str:
    slow = spread([value for each in told for value in each.slowdowns])
    worst = spread([max(each.slowdowns) for each in told])
    figures = [
        f"{100 * sum(each.of_bound for each in told) / len(told):.1f} %",
        f"{slow.mean:.3f}",
        f"{worst.mean:.3f}",
        f"{worst.p90:.2f}",
        f"{worst.max:.2f}",
        f"{spread([each.longest_wait for each in told]).p90:.2f}",
        f"{100 * sum(each.swap_duty for each in told) / len(told):.1f} %",
    ]
    return f"| `{policy}` | {' | '.join(figures)} |"


COLUMNS = ("policy", "useful duty ÷ bound", "slowdown", "worst job", "its p90", "its max")
COLUMNS += ("longest wait, p90", "swaps")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--swap-s", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=60, help="of the job with the longest ones")
    parser.add_argument("--pairs", type=int, default=0, help="so many, drawn with --seed; 0: all")
    parser.add_argument("--triples", type=int, default=100, help="so many, drawn with --seed; 0: all")
    parser.add_argument("--policies", default=",".join(NAMES), help="separated by spaces or commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jobs = [job_of(profile) for profile in read_all(options.traces, note=print)]
    policies = options.policies.split() if " " in options.policies else options.policies.split(",")
    for size, wanted in ((2, options.pairs), (3, options.triples)):
        sets = list(itertools.combinations(jobs, size))
        if wanted and wanted < len(sets):
            sets = random.Random(options.seed).sample(sets, wanted)
        more = (options.swap_s, options.steps)
        with ProcessPoolExecutor(options.processes, initializer=tie, initargs=(os.getpid(),)) as pool:
            runs = [pool.submit(one, jobs, policy, *more) for jobs in sets for policy in policies]
            told = [run.result() for run in runs]
        for fits in (True, False):
            part = [each for each in told if (each.load <= FITS) == fits]
            if part:
                words = f"Σ duty at most {FITS}" if fits else f"Σ duty above {FITS}"
                kind = f"{('pairs', 'triples')[size - 2]}, {words}"
                print(f"\n**{kind}** ({len(part) // len(policies)} sets)\n\n{HEAD}")
                for policy in policies:
                    print(row(policy, [each for each in part if each.policy == policy]))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
