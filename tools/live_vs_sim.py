"""How right is the simulator? The same jobs live and simulated, pair by pair.

    python tools/live_vs_sim.py TRACES… [--pairs 20] [--swap-s 0] [--seconds 24] [--json FILE]

Live means: ``coslice up`` (orchestrator, agent, SQLite, journal) and two job processes that go through the
phases of their traces in compressed time. On-phases burn the accelerator's core until they are over,
off-phases wait; with ``--swap-s`` each job registers state whose moves take half of that. The simulator gets
the same phases in the same order, and the cost of messages and hand-overs as measured once, before.

Durations are kept by the clock, not by work done, so a busy machine disturbs the figures little.
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BOUND = 60.0


# ── one job process ────────────────────────────────────────────────────────


class Burner:
    """Keeps a core busy while it is on: a process of its own at the lowest priority, so that nothing which
    keeps time or talks has to wait for it (a thread would hold the interpreter's lock while descheduled)."""

    def __init__(self) -> None:
        self._on = mmap.mmap(-1, 1)
        out, self._wake = os.pipe()
        if os.fork() == 0:
            os.close(self._wake)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: burn no longer than the job lives
            os.nice(40)
            data = bytes(1 << 16)
            while os.read(out, 1):  # the end of the pipe is the end of the job
                while self._on[0]:
                    hashlib.sha256(data).digest()
            os._exit(0)
        os.close(out)

    def start(self) -> None:
        self._on[0] = 1
        os.write(self._wake, b"!")

    def stop(self) -> None:
        self._on[0] = 0


def sleep_until(at: float) -> None:
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def job() -> None:
    """Runs the plan that comes on stdin; says when it is ready and, at the end, what happened when."""
    import coslice
    from coslice.profile.cycle import Batches

    plan: dict[str, Any] = json.loads(sys.stdin.readline())
    burner = Burner()  # before there are threads
    client = coslice.connect()
    registered = not plan["swap_s"]
    client.acquire()  # dials, and loads what a first call loads: not in the figures
    client.yield_()
    print(json.dumps({"ready": True}), flush=True)
    begin = float(json.loads(sys.stdin.readline())["begin"])
    until = begin + plan["seconds"]
    batches = Batches(plan["staleness"], start=begin) if plan["produce"] else None

    def move() -> None:
        time.sleep(plan["swap_s"] / 2)

    spans: list[tuple[float, float]] = []
    ends: list[float] = []
    waits: list[float] = []
    sleep_until(begin)
    now = begin
    for k in itertools.count():
        if batches is not None:
            produce = plan["produce"][k % len(plan["produce"])]
            now = max(now, batches.arrives(sum(seconds for seconds, _ in produce)))
            sleep_until(min(now, until))
        for seconds, group in plan["loop"][k % len(plan["loop"])]:
            if not group:
                now += seconds
                sleep_until(min(now, until))
                continue
            if time.monotonic() >= until:
                break
            asked = time.monotonic()
            client.acquire()
            waits.append(time.monotonic() - asked)
            if not registered:  # under its first lease, as real jobs build their state
                coslice.workload.register(on_snapshot=move, on_restore=move)
                registered = True
            held = time.monotonic()
            burner.start()
            sleep_until(min(held + seconds, until))
            burner.stop()
            now = time.monotonic()
            spans.append((held - begin, now - begin))
            client.yield_()
        if time.monotonic() >= until:
            break
        ends.append(now - begin)
        if batches is not None:
            batches.finished(now)
    client.close()
    print(json.dumps({"spans": spans, "ends": ends, "waits": waits}), flush=True)


# ── one pair, live ─────────────────────────────────────────────────────────


def start(command: list[str], environment: dict[str, str], errors: Path) -> subprocess.Popen[str]:
    libc = ctypes.CDLL(None)

    def with_us() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: however we end, none is left behind

    with errors.open("a") as stderr:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            preexec_fn=with_us,
            start_new_session=True,  # Ctrl-C ends us, and we end them
        )


def hear(process: subprocess.Popen[str], errors: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{errors.stem} ended early:\n{errors.read_text()[-2000:]}")
    return dict(json.loads(line))


def tell(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def live(jobs: list[Any], *, policy: str, seconds: float, swap_s: float) -> list[dict[str, Any]]:
    """Run the jobs (``simulate.spec.Job``) for so long; what each did, relative to their common start."""
    from coslice.cli.run import job_environment

    base = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk's mood is not what is measured
    with tempfile.TemporaryDirectory(prefix="live-vs-sim-", dir=memory) as name:
        folder, processes = Path(name), list[subprocess.Popen[str]]()
        try:
            up = [
                sys.executable,
                "-m",
                "coslice.cli.main",
                "up",
                "--json",
                "--memory",
                "64MiB",
                "--device",
                "host",
            ]
            up += [
                "--listen",
                "127.0.0.1:0",
                "--agent-listen",
                "127.0.0.1:0",
                "--state",
                name,
                "--policy",
                policy,
            ]
            server = start(up, base, folder / "up.log")
            processes.append(server)
            facts = hear(server, folder / "up.log")
            for spec in jobs:
                environment = job_environment(
                    base,
                    job=spec.name,
                    groups=("default",),
                    need=0,
                    world=0,
                    orchestrator=str(facts["orchestrator"]),
                    agent=str(facts["agent"]) if swap_s else "",
                    cpus=(max(os.sched_getaffinity(0)),),
                )
                log = folder / f"{spec.name}.log"
                process = start([sys.executable, __file__, "--as-job"], environment, log)
                processes.append(process)
                plan = {
                    "seconds": seconds,
                    "swap_s": swap_s,
                    "staleness": spec.staleness,
                    "loop": [[(part.seconds, part.group) for part in one] for one in spec.loop],
                    "produce": [[(part.seconds, part.group) for part in one] for one in spec.produce],
                }
                tell(process, plan)
            runners = list(zip(jobs, processes[1:], strict=True))
            for spec, process in runners:
                hear(process, folder / f"{spec.name}.log")
            begin = time.monotonic() + 0.1
            for _, process in runners:
                tell(process, {"begin": begin})
            return [hear(process, folder / f"{spec.name}.log") for spec, process in runners]
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in reversed(processes):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def costs(policy: str, *, state: bool, at_once: int) -> dict[str, float]:
    """What messages and a hand-over cost on this machine now beside the moves themselves, as mean seconds.

    Measured as they will be paid: ``at_once`` runs side by side, with phases of more than a second (a
    process that slept is slower than one that did not). ``state``: of jobs with registered state, whose way
    out and in has a price even if it moves nothing.
    """
    from coslice.simulate.spec import alternating

    def side_by_side(jobs: list[Any], seconds: float, swap_s: float) -> list[list[dict[str, Any]]]:
        with ThreadPoolExecutor(at_once) as pool:
            runs = [
                pool.submit(live, jobs, policy=policy, seconds=seconds, swap_s=swap_s) for _ in range(at_once)
            ]
            return [run.result() for run in runs]

    waits = [
        wait
        for (alone,) in side_by_side([alternating("ping", 1.0, 1.0)], 20.0, 0.0)
        for wait in alone["waits"][1:]
    ]
    message_s = statistics.mean(waits) / 2
    pair, swap_s = [alternating("ping", 1.5, 0.0), alternating("pong", 1.5, 0.0)], 0.02 if state else 0.0
    gaps: list[float] = []
    for told in side_by_side(pair, 30.0, swap_s):
        spans = sorted(tuple(span) for one in told for span in one["spans"])[2:]
        gaps += [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    handoff_s = max(0.0, statistics.mean(gaps) - swap_s - 2 * message_s)
    return {"message_s": message_s, "handoff_s": handoff_s}


# ── both, and the difference ───────────────────────────────────────────────


def scaled(spec: Any, factor: float) -> Any:
    from msgspec.structs import replace

    def shrink(passes: Any) -> Any:
        return tuple(tuple(replace(part, seconds=part.seconds * factor) for part in one) for one in passes)

    return replace(spec, loop=shrink(spec.loop), produce=shrink(spec.produce))


def compare(pair: list[Any], *, options: argparse.Namespace, cost: dict[str, float]) -> dict[str, Any]:
    from coslice.simulate.run import simulate
    from coslice.simulate.solo import alone
    from coslice.simulate.spec import Pool, Scenario, whole_swap

    steps = [alone(spec, options.steps).ends[-1] for spec in pair]
    factor = options.seconds / max(steps)
    jobs = [scaled(spec, factor) for spec in pair]
    swap_s = options.swap_s * factor
    told = live(jobs, policy=options.policy, seconds=options.seconds, swap_s=swap_s)
    simulated = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=tuple(jobs),
            cost=whole_swap(swap_s, **cost),
            policy=options.policy,
            until=options.seconds,
        )
    )
    busy = sum(end - begin for one in told for begin, end in one["spans"])
    slow = {
        spec.name: one["ends"][-1] / alone(spec, len(one["ends"])).ends[-1]
        for spec, one in zip(jobs, told, strict=True)
        if one["ends"]
    }
    return {
        "pair": [spec.name for spec in pair],
        "compressed": round(1 / factor, 1),
        "swap_s": swap_s,
        "steps": [len(one["ends"]) for one in told],
        "live": {"useful_duty": busy / options.seconds, "slowdown": slow},
        "simulated": {"useful_duty": simulated.useful_duty, "slowdown": simulated.slowdown},
    }


def errors(results: list[dict[str, Any]]) -> dict[str, float]:
    duty = sorted(abs(r["live"]["useful_duty"] - r["simulated"]["useful_duty"]) for r in results)
    slow = sorted(
        abs(r["simulated"]["slowdown"][name] / value - 1)
        for r in results
        for name, value in r["live"]["slowdown"].items()
        if name in r["simulated"]["slowdown"]
    )
    return {
        "pairs": len(results),
        "useful_duty_points_max": 100 * duty[-1],
        "useful_duty_points_mean": 100 * sum(duty) / len(duty),
        "slowdown_error_mean": sum(slow) / len(slow),
        "slowdown_error_p90": slow[min(len(slow) - 1, -(-9 * len(slow) // 10) - 1)],
        "slowdown_error_max": slow[-1],
    }


def main() -> None:
    if sys.argv[1:] == ["--as-job"]:
        job()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, help="what `coslice profile` reads, one job each")
    parser.add_argument("--pairs", type=int, default=0, help="so many, drawn with --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--swap-s", type=float, default=0.0, help="a whole hand-over, in the traces' seconds")
    parser.add_argument("--seconds", type=float, default=24.0, help="a live run takes so long")
    parser.add_argument("--steps", type=int, default=12, help="solo steps of the slower job in that time")
    parser.add_argument("--at-once", type=int, default=1, help="live runs side by side")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    from coslice.profile.read import read_all
    from coslice.simulate.from_profile import job_of

    jobs = [job_of(profile) for profile in read_all(options.traces, note=print)]
    pairs = [list(pair) for pair in itertools.combinations(jobs, 2)]
    if options.pairs and options.pairs < len(pairs):
        pairs = random.Random(options.seed).sample(pairs, options.pairs)
    cost = costs(options.policy, state=options.swap_s > 0, at_once=options.at_once)
    words = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in cost.items())
    print(f"{len(pairs)} pairs; {words}", file=sys.stderr)
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        tasks = [pool.submit(compare, pair, options=options, cost=cost) for pair in pairs]
        try:
            for task in tasks:
                result = task.result()
                results.append(result)
                words = [" + ".join(result["pair"])]
                for kind in ("live", "simulated"):
                    figures = result[kind]
                    slow = " ".join(f"{value:.3f}" for value in figures["slowdown"].values())
                    words.append(f"{kind} {100 * figures['useful_duty']:.1f} % [{slow}]")
                print("  ".join(words), file=sys.stderr, flush=True)
                if options.json:
                    whole = {**cost, "errors": errors(results), "results": results}
                    options.json.write_text(json.dumps(whole, indent=1) + "\n")
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
    for key, value in errors(results).items():
        print(f"{key:26} {value:.4g}")


if __name__ == "__main__":
    main()
