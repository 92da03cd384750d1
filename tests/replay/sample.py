"""A small journal written by hand: two jobs, three turns, one swap of 3 MiB each way, with round figures."""

import json
from pathlib import Path
from typing import Any

MIB = 1 << 20


def _event(
    t: float,
    event: dict[str, Any],
    effects: list[Any],
    occupancy: str,
    job: str,
    epoch: int,
    waiting: list[str],
) -> dict[str, Any]:
    state = {"occupancy": occupancy, "job": job or None, "epoch": epoch, "waiting": waiting}
    return {
        "t": t,
        "group": "g",
        "event": event,
        "effects": effects,
        "reasons": [["granted_swapped", f"at {t}"]],
        "state": state,
    }


def _acquire(job: str, request: str) -> dict[str, Any]:
    return {"type": "AcquireRequested", "job": job, "request": request, "phase": "train"}


def _grant(job: str, request: str, epoch: int, text: str) -> dict[str, Any]:
    return {
        "type": "Grant",
        "job": job,
        "request": request,
        "epoch": epoch,
        "reason": {"code": "x", "text": text},
    }


def lines() -> list[dict[str, Any]]:
    """job-a holds 100-102 and 106-108, job-b 103-105; swaps 102-103 and 105-106 (3 MiB each)."""
    moved = {"type": "OpSucceeded", "bytes_in": 2 * MIB, "bytes_out": MIB}
    return [
        {"coslice_journal": 1, "started": 1.7e9, "clock": 100.0, "orchestrator": "test-1"},
        _event(
            100.0,
            _acquire("job-a", "a1"),
            [_grant("job-a", "a1", 1, "nobody was there")],
            "held",
            "job-a",
            1,
            [],
        ),
        _event(101.0, _acquire("job-b", "b1"), [], "held", "job-a", 1, ["job-b"]),
        {
            "t": 101.5,
            "note": {"job": "job-a", "session": "s", "name": "reward", "value": 0.25, "step": 1, "text": ""},
        },
        _event(102.0, {"type": "LeaseYielded", "job": "job-a"}, [], "swapping", "job-b", 2, []),
        _event(103.0, moved, [_grant("job-b", "b1", 2, "swapped in")], "held", "job-b", 2, []),
        _event(104.0, _acquire("job-a", "a2"), [], "held", "job-b", 2, ["job-a"]),
        _event(105.0, {"type": "LeaseYielded", "job": "job-b"}, [], "swapping", "job-a", 3, []),
        _event(106.0, moved, [_grant("job-a", "a2", 3, "swapped back")], "held", "job-a", 3, []),
        {
            "t": 107.0,
            "note": {"job": "job-a", "session": "s", "name": "reward", "value": 0.5, "step": 2, "text": ""},
        },
        _event(108.0, {"type": "LeaseYielded", "job": "job-a"}, [], "resident", "job-a", 3, []),
    ]


def solo() -> list[dict[str, Any]]:
    phases = [["train", 10.0, 12.0], ["reward", 12.0, 15.0], ["train", 15.0, 17.0]]
    summary = {
        "solo_duty": {"job-a": 0.45, "job-b": 0.44},
        "useful_duty": 0.875,
        "held_duty": 0.91,
        "duty_bound": 0.89,
        "slowdown": {"job-a": 1.02, "job-b": 1.03},
        "state_identical": True,
        "swaps": 2,
        "bytes_moved": 6 * MIB,
        "solo_wall_s": 40.0,
        "shared_wall_s": 22.0,
    }
    return [
        {
            "t": 200.0,
            "solo": {
                "job": "job-a",
                "round": 1,
                "steps": [[10.0, 15.0]],
                "phases": phases,
                "rewards": [0.25, 0.5],
            },
        },
        {"t": 200.0, "summary": summary},
    ]


def write(path: Path, *, demo: bool = False, torn: bool = False) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines() + (solo() if demo else []))
    path.write_text(text + ('{"t": 109.0, "gro' if torn else ""))
    return path
