"""What coslice does on this machine's GPU: ``python benchmarks/gpu_check.py`` (under 8 minutes, no network).

Needs torch and ``coslice[cuda]`` (or this checkout). Whole-process and in-process swaps of 1, 8 and 32 GiB,
as far as they fit, each against a plain pinned copy of the same size in the same run; whether every byte came
back; two jobs that share the device. Writes ``docs/measurements/<gpu>.json``.

``--fakes`` runs the same steps, small, on the fake driver of ``tests/fakes`` with torch on the CPU: for tests
of this script. Its figures say nothing.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

MIB, GIB = 1 << 20, 1 << 30
SIZES = (GIB, 8 * GIB, 32 * GIB)
FAKE_SIZES = (MIB, 4 * MIB, 8 * MIB)
LIMIT = 450.0
"""Seconds for all of it. What would end later is left out, and said so."""
FOR_TURNS = 120.0
"""Of them, for the two jobs: their size is chosen so that they need no more."""
TURNS = 4
Row = dict[str, Any]


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


BEGAN = time.monotonic()


def seconds_left() -> float:
    """Seconds."""
    return LIMIT - (time.monotonic() - BEGAN)


def rate(size: int, seconds: float) -> float:
    return round(size / 1e9 / seconds, 3) if seconds > 0 else 0.0


# ── plain copies: what the hardware gives ──────────────────────────────────


def plain_copies(sizes: tuple[int, ...], device: str) -> dict[int, Row]:
    """GB/s of one copy between the device and pinned host memory, each way, warm."""
    import torch

    found = {}
    for size in sizes:
        there = torch.empty(size, dtype=torch.uint8, device=device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
        spent = {}
        for way, (target, source) in {"out": (here, there), "in": (there, here)}.items():
            for _ in range(2):  # the first touches the pages
                _wait(device)
                began = time.perf_counter()
                target.copy_(source)
                _wait(device)
                spent[way] = time.perf_counter() - began
        found[size] = {f"{way}_gb_s": rate(size, seconds) for way, seconds in spent.items()}
        del there, here, target, source
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


# ── whole processes ────────────────────────────────────────────────────────


async def whole_process(size: int, folder: Path, fakes: bool) -> Row:
    """A process with so much device memory leaves and comes back, twice: cold, then warm."""
    from coslice.agent.backends import cuda
    from coslice.agent.backends.base import NodeContext
    from coslice.agent.buffers import HostBuffers
    from coslice.agent.config import AgentConfig
    from coslice.agent.discovery.surveyor import Surveyor
    from coslice.agent.host import AnonymousMemory
    from coslice.agent.members import Member, member_id
    from coslice.agent.processes import start_time
    from coslice.core.ids import GroupId, Incarnation, JobId, NodeId
    from coslice.store import make_store
    from coslice.testing import gpu_job

    config = AgentConfig(
        node=NodeId("check"), state_dir=str(folder), runtime_dir=str(folder / "run"), host_budget=1 << 50
    )
    store, surveyor = make_store(":memory:"), Surveyor()
    context = NodeContext(
        config=config, buffers=HostBuffers(1 << 50), surveyor=surveyor, store=store, found=await store.load()
    )
    backend = cuda.make(context, {"margin": 0} if fakes else {})
    command = [sys.executable, gpu_job.__file__, "--bytes", str(size)]
    job = subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    member: Member | None = None
    try:
        await asyncio.to_thread(_line, job)
        started = start_time(job.pid)
        assert started is not None
        name, token = JobId("check"), Incarnation("check-1")
        member = Member(
            id=member_id(name, token, job.pid, started),
            job=name,
            incarnation=token,
            group=GroupId(""),
            pid=job.pid,
            started=started,
            memory=AnonymousMemory(job.pid),
            device="cuda",
            backend="cuda",
        )
        row: Row = {"bytes": size}
        for kind in ("cold", "warm"):
            out = await backend.snapshot([member], op=f"{kind}/out")
            if out.bytes < size:
                raise RuntimeError(
                    f"{out.bytes} bytes of {size} were found on the device: NVML does not name process "
                    f"{job.pid}. In a container, share the host's pid namespace (docker: --pid=host)"
                )
            survey = await surveyor.survey()
            row[f"{kind}_left_on_device"] = survey.bytes_of([job.pid])
            back = await backend.restore([member], op=f"{kind}/in")
            row |= {
                f"{kind}_out_s": round(out.seconds, 4),
                f"{kind}_in_s": round(back.seconds, 4),
                f"{kind}_out_gb_s": rate(out.bytes, out.seconds),
                f"{kind}_in_gb_s": rate(back.bytes, back.seconds),
            }
            row["moved_bytes"] = out.bytes
        row["bit_equal"] = (await asyncio.to_thread(_ask, job, "check"))["ok"]
        return row
    finally:
        if member is not None:  # ending a live process that was restored was seen to hang a node
            await backend.retire([member])
        job.kill()
        job.communicate()
        await backend.close()
        await surveyor.close()
        await store.close()
        if member is not None:
            member.close()


def _line(process: "subprocess.Popen[str]") -> Row:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with status {process.wait()}")
    said: Row = json.loads(line)
    return said


def _ask(process: "subprocess.Popen[str]", word: str) -> Row:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return _line(process)


# ── in the process ─────────────────────────────────────────────────────────


def in_process(size: int, device: str) -> Row:
    """torch tensors of that size, moved by the adapter inside this process. Run in a process of its own."""
    import torch

    import coslice.workload

    count = 8
    each = size // count // 8
    tensors = [torch.arange(i, i + each, dtype=torch.int64, device=device) for i in range(count)]
    handle = coslice.workload.register(tensors=tensors, env={})
    row: Row = {"bytes": handle.state_bytes}
    for kind in ("cold", "warm"):
        began = time.perf_counter()
        moved = handle.offload()
        middle = time.perf_counter()
        handle.restore()
        _wait(device)
        ended = time.perf_counter()
        row |= {
            f"{kind}_out_s": round(middle - began, 4),
            f"{kind}_in_s": round(ended - middle, 4),
            f"{kind}_out_gb_s": rate(moved, middle - began),
            f"{kind}_in_gb_s": rate(moved, ended - middle),
        }
    expected = torch.arange(each, dtype=torch.int64, device=device)
    row["bit_equal"] = all(bool(torch.equal(tensor - i, expected)) for i, tensor in enumerate(tensors))
    return row


# ── two jobs ───────────────────────────────────────────────────────────────


def turns(size: int) -> None:
    """One of two jobs: its device memory is checked and rewritten in each of its turns."""
    import coslice
    from coslice.testing.gpu_job import Device

    orchestrator = coslice.connect()
    device: Device | None = None
    for turn in range(TURNS):
        asked = time.monotonic()
        with orchestrator.on_accelerators():
            granted = time.monotonic()
            if device is None:
                device = Device(0)
                device.allocate(size)
            ok = device.check()
            device.fill(turn + 1)
        print(json.dumps({"turn": turn, "ok": ok, "waited_s": round(granted - asked, 4)}), flush=True)


def turns_size(device: int, host: int, rates: Row) -> int:
    """Bytes of each of the two jobs: 60 % of the device, if both fit into host memory (they may be there at
    once, for a moment) and every turn's way out, check, filling and way in end in time. A small device costs
    nothing: ``two_jobs`` tells the agent what share of it they may use."""
    ways = sum(1 / max(rates.get(f"warm_{way}_gb_s", 1.0), 0.1) for way in ("out", "in"))
    seconds = (ways + 1 / 2 + 1 / 3) / 1e9  # pageable copies of a check and of a filling
    return int(min(device * 0.6, host * 0.35, FOR_TURNS / (2 * TURNS * seconds)))


def two_jobs(size: int, folder: Path, fakes: bool) -> Row:
    """``coslice up`` and two ``coslice run --backend cuda``; each takes 60 % of what both may use."""
    coslice = [sys.executable, "-m", "coslice.cli.main"]
    flags = ["--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--state", str(folder / "up")]
    flags += ["--memory", f"{size * 10 // 6}B", "--host-memory", f"{size * 5 // 2 + 2 * GIB}B"]
    backend = "cuda:margin=0" if fakes else "cuda"
    up = subprocess.Popen(
        [*coslice, "up", "--device", "cuda", "--json", "--backend", backend, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    jobs: list[subprocess.Popen[str]] = []
    watchdog = threading.Timer(max(FOR_TURNS, seconds_left()), lambda: [each.kill() for each in (*jobs, up)])
    watchdog.start()
    try:
        ready = _line(up)
        address = ["-o", ready["orchestrator"], "--agent", ready["agent"]]
        began = time.monotonic()
        for name in ("a", "b"):
            work = [sys.executable, __file__, "--role", "turns", "--bytes", str(size)]
            command = [*coslice, "run", *address, "--job", name, "--backend", "cuda", "--", *work]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        said = [[json.loads(line) for line in job.communicate()[0].splitlines()] for job in jobs]
        waits = sorted(line["waited_s"] for lines in said for line in lines[1:])
        done = all(job.returncode == 0 and len(lines) == TURNS for job, lines in zip(jobs, said, strict=True))
        return {
            "bytes_each": size,
            "turns_each": TURNS,
            "wall_s": round(time.monotonic() - began, 3),
            "median_wait_s": waits[len(waits) // 2] if waits else None,
            "turns_done": [len(lines) for lines in said],
            "statuses": [job.returncode for job in jobs],
            "bit_equal": done and all(line["ok"] for lines in said for line in lines),
        }
    finally:
        watchdog.cancel()
        for process in jobs:
            if process.poll() is None:
                process.terminate()
                process.wait()
        up.send_signal(signal.SIGINT)
        up.communicate()


# ── all of it ──────────────────────────────────────────────────────────────


def run(fakes: bool) -> Row:
    from coslice.agent.cuda import devices
    from coslice.agent.discovery import procfs

    found = devices()
    if not found:
        sys.exit(
            "no GPU is found here: NVML of the driver and nvidia-ml-py are needed "
            "(pip install 'coslice[cuda]'); without a GPU, --fakes runs the same steps on a fake driver"
        )
    gpu = found[0]
    torch_device = "cpu" if fakes else "cuda"
    room = min(gpu.total_bytes * 9 // 10, procfs.available_memory() // 2)
    sizes = tuple(size for size in (FAKE_SIZES if fakes else SIZES) if size <= room)
    result: Row = {"gpu": gpu.name, "device_bytes": gpu.total_bytes, "fakes": fakes, **versions()}
    left = [size for size in (FAKE_SIZES if fakes else SIZES) if size > room]
    result["left_out"] = [
        f"{size >> 20} MiB: device and host have room for {room >> 20} MiB" for size in left
    ]
    say(f"{gpu.name}: plain copies")
    plain = plain_copies(sizes, torch_device) if torch_device == "cpu" else _role("plain", sizes)
    result["plain"] = [{"bytes": int(size), **row} for size, row in plain.items()]
    with tempfile.TemporaryDirectory(prefix="coslice-") as name:
        folder = Path(name)
        steps: dict[str, Callable[[int], Row]] = {
            "whole_process": lambda size: asyncio.run(whole_process(size, folder, fakes)),
            "in_process": lambda size: _role("in_process", (size,), fakes=fakes),
        }
        for step, work in steps.items():
            result[step], rate_before = [], 0.0  # seconds a byte of the size before
            for size in sizes:
                if seconds_left() - FOR_TURNS < rate_before * size:
                    result["left_out"].append(f"{step} of {size >> 20} MiB: out of time")
                    continue
                say(f"{step.replace('_', ' ')}: {size >> 20} MiB")
                began = time.monotonic()
                result[step].append(_against(plain[size], _tried(work, size)))
                rate_before = (time.monotonic() - began) / size
        best = result["whole_process"][-1] if result["whole_process"] and not fakes else {}
        share = turns_size(gpu.total_bytes, procfs.available_memory(), best)
        say(f"two jobs, each with {share >> 20} MiB")
        result["two_jobs"] = _tried(lambda size: two_jobs(size, folder, fakes), share)
    result["seconds"] = round(time.monotonic() - BEGAN, 1)
    return result


def _against(plain: Row, row: Row) -> Row:
    """Warm rates as shares of the plain copy's of the same run."""
    for way in ("out", "in"):
        if row.get(f"warm_{way}_gb_s") and plain.get(f"{way}_gb_s"):
            row[f"{way}_ratio"] = round(row[f"warm_{way}_gb_s"] / plain[f"{way}_gb_s"], 3)
    return row


def _tried(work: Callable[[int], Row], size: int) -> Row:
    """One step that fails does not end the others."""
    try:
        return work(size)
    except Exception as error:
        say(f"failed: {error}")
        return {"bytes": size, "error": f"{type(error).__name__}: {error}", "bit_equal": False}


def _role(role: str, sizes: tuple[int, ...], *, fakes: bool = False) -> Any:
    """A step in a process of its own: what torch keeps on the device is gone with it."""
    command = [sys.executable, __file__, "--role", role, "--bytes", ",".join(map(str, sizes))]
    done = subprocess.run(
        [*command, *(["--fakes"] if fakes else [])], stdout=subprocess.PIPE, timeout=seconds_left()
    )
    if done.returncode:
        raise RuntimeError(f"{role} ended with status {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {int(size): row for size, row in answer.items()} if role == "plain" else answer


def versions() -> Row:
    from importlib.metadata import PackageNotFoundError, version

    found: Row = {"python": sys.version.split()[0]}
    for name in ("torch", "cuda-bindings", "nvidia-ml-py"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    from coslice.agent.discovery.nvml import Nvml

    survey = Nvml().survey()
    return found | {"driver": survey.driver, "cuda_api": survey.cuda}


def summary(result: Row) -> bool:
    """Prints what was found; True if every byte came back."""
    for step in ("whole_process", "in_process"):
        for row in result[step]:
            rates = " ".join(f"{key}={row[key]}" for key in row if key.endswith(("gb_s", "ratio")))
            found = row.get("error", rates)
            print(f"{step:14} {row['bytes'] >> 20:6} MiB  bit_equal={row['bit_equal']}  {found}")
    print(f"two jobs: {result['two_jobs']}")
    rows = [*result["whole_process"], *result["in_process"], result["two_jobs"]]
    return all(row.get("bit_equal") for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fakes", action="store_true", help="on the fake driver, small")
    parser.add_argument("--out", type=Path, help="where to write; default docs/measurements/<gpu>.json")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        sizes = tuple(int(size) for size in options.bytes.split(","))
        if options.role == "turns":
            turns(sizes[0])
        elif options.role == "plain":
            print(json.dumps(plain_copies(sizes, "cuda")))
        else:
            print(json.dumps(in_process(sizes[0], "cpu" if options.fakes else "cuda")))
        return
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    if options.fakes and "COSLICE_FAKE_CUDA" not in os.environ:
        sys.exit(_on_fakes())
    result = run(options.fakes)
    whole = summary(result)
    slug = re.sub(r"[^a-z0-9]+", "-", result["gpu"].lower()).strip("-")
    out = options.out or (None if options.fakes else ROOT / "docs" / "measurements" / f"{slug}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {out}")
    if not whole:
        sys.exit("not everything came back as it was: see above")


def _on_fakes() -> int:
    """The same again, with the fakes in the library path: that is read when a program starts."""
    from coslice.testing.fake_cuda import CannotBuild, FakeNode

    with tempfile.TemporaryDirectory(prefix="coslice-") as folder:
        try:
            node = FakeNode(Path(folder) / "node", capacity=16 * MIB, name="Fake GPU", log=0)
        except CannotBuild as error:
            print(error, file=sys.stderr)
            return 2
        return subprocess.run([sys.executable, *sys.argv], env=node.environment()).returncode


if __name__ == "__main__":
    main()
