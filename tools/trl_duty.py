"""How well two TRL jobs use one host accelerator: each alone, then both. ``python tools/trl_duty.py``.

Runs ``examples/trl_grpo.py`` with seeds 1 and 2. Alone: without coslice, on the accelerator's core. Together:
under a ``coslice up`` of its own. Reports busy duty alone, useful duty together, its bound min(1, Σ alone),
step times, and whether the trained weights are the same. As in ``coslice demo``, useful is the processor time
of the trainers' threads while they compute, in the window in which both are past their first two steps and
neither has ended; moving state, waiting and coslice itself are not in it.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from coslice.core.duty import duty_bound
from coslice.demo.accounting import Section, Window

ROOT = Path(__file__).resolve().parents[1]
COSLICE = (sys.executable, "-m", "coslice.cli.main")
WARM_UP = 2
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")} | {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def command(seed: int, options: argparse.Namespace) -> list[str]:
    script = [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), "--seed", str(seed)]
    script += ["--batch", str(options.batch), "--letters", str(options.letters)]
    return [*script, "--steps", str(options.steps), "--reward-s", str(options.reward_s)]


def start(arguments: list[str], cores: set[int] | None = None) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    if cores:
        os.sched_setaffinity(process.pid, cores)
    return process


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a job failed with status {process.returncode}; what it said is above")
    facts: dict[str, Any] = json.loads(said.splitlines()[-1])
    return facts | {"computed": [Section(*stretch) for stretch in facts["computed"]]}


def duty(runs: list[dict[str, Any]]) -> float:
    """Share of the window in which somebody computes."""
    window = Window(
        max(run["computed"][WARM_UP].begin for run in runs), min(run["computed"][-1].end for run in runs)
    )
    if window.wall <= 0:
        raise SystemExit("the jobs ran one after the other: give them more --steps")
    return window.section_cpu([section for run in runs for section in run["computed"]]) / window.wall


def step_s(run: dict[str, Any]) -> float:
    """Median from one reward to the next."""
    ends = [section.end for section in run["computed"][WARM_UP:-1]]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def together(options: argparse.Namespace, folder: str) -> tuple[list[dict[str, Any]], int]:
    group = f"accelerator:cpus={options.core}:memory={options.memory}"
    up = start([*COSLICE, "up", "--json", "--device", "host", "--group", group, "--state", folder,
                "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"])  # fmt: skip
    try:
        assert up.stdout is not None
        facts = json.loads(up.stdout.readline())
        where = ["-o", facts["orchestrator"], "--agent", facts["agent"]]
        jobs = [
            start([*COSLICE, "run", "--job", f"job-{seed}", *where, "--", *command(seed, options)])
            for seed in (1, 2)
        ]
        runs = [result(job) for job in jobs]
        status = subprocess.run(
            [*COSLICE, "status", "-o", facts["orchestrator"], "--json"],
            capture_output=True, text=True, check=True, env=ENVIRONMENT,
        )  # fmt: skip
        return runs, sum(int(group.get("swaps", 0)) for group in json.loads(status.stdout)["groups"])
    finally:
        up.terminate()
        up.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64, help="answers per step")
    parser.add_argument("--letters", type=int, default=24, help="the longest answer")
    parser.add_argument("--reward-s", type=float, default=0.8, help="how long a batch is scored")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the accelerator")
    parser.add_argument("--memory", default="1GiB", help="of the accelerator")
    parser.add_argument("--state", default="", help="keep the orchestrator's journal in this folder")
    options = parser.parse_args()
    alone = [result(start(command(seed, options), {options.core})) for seed in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        shared, swaps = together(options, options.state or folder)
    solo = [duty([run]) for run in alone]
    useful, bound = duty(shared), duty_bound(solo)
    report = {
        "solo_busy_duty": [round(each, 3) for each in solo],
        "bound": round(bound, 3),
        "useful_duty": round(useful, 3),
        "of_bound": round(useful / bound, 3),
        "step_s_alone": [round(step_s(run), 3) for run in alone],
        "step_s_shared": [round(step_s(run), 3) for run in shared],
        "swaps": swaps,
        "same_weights": [one["digest"] for one in alone] == [one["digest"] for one in shared],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
