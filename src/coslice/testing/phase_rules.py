"""What is wrong with a recorded trace of phases: the rules that ``coslice check-phases`` reports by.

Pure: lines of ``client.recorder`` in, findings out. Each finding names its rule, the phase and the line of
the job's own code.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULES: Mapping[str, str] = {
    "lock-order": "two jobs that take groups in different orders can wait for each other for ever",
    "leak": "accelerators that are never given up stop every other job until max_hold",
    "outside": "outside a phase the state may be in host memory, or another job's on the device",
    "not-held": "a yield gives up what an acquire took: call acquire() first, and yield as often",
    "short": "a phase shorter than a swap costs others more than it uses",
}
KILLED = "its process was killed, or left by os._exit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    rule: str
    phase: str
    where: str
    """``file:line`` in the job's code."""
    text: str
    pid: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of one process, all its passages together."""

    name: str
    groups: tuple[str, ...]
    where: str
    seconds: tuple[float, ...]
    """Of each passage that ended well."""
    errors: tuple[str, ...] = ()
    """Of each that an exception ended: its name."""


def phases(lines: Iterable[Mapping[str, Any]]) -> list[Phase]:
    """In the order of first appearance."""
    entered: dict[tuple[int, int], float] = {}
    spent: dict[tuple[int, str, tuple[str, ...], str], list[float | str]] = {}
    for line in lines:
        if line["what"] == "enters":
            entered[line["pid"], line["record"]] = line["at"]
            spent.setdefault(_key(line), [])
        elif line["what"] == "leaves":
            began = entered.pop((line["pid"], line["record"]), None)
            if began is not None:
                # A section is left where it is entered; a plain yield is elsewhere, so the entry names it.
                key = next((k for k in reversed(spent) if (k[0], k[1]) == (line["pid"], line["phase"])), None)
                passage = line.get("error") or line["at"] - began
                spent.setdefault(key or _key(line), []).append(passage)
    return [
        Phase(
            name=name,
            groups=groups,
            where=where,
            seconds=tuple(passage for passage in found if not isinstance(passage, str)),
            errors=tuple(passage for passage in found if isinstance(passage, str)),
        )
        for (_, name, groups, where), found in spent.items()
    ]


def check(
    lines: Sequence[Mapping[str, Any]], *, order: Sequence[str] = (), swap_s: float = 0.0
) -> list[Finding]:
    """Everything that breaks a rule. ``order``: groups, first to be taken first; others follow by name."""
    findings: list[Finding] = []
    held: dict[int, dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        mine = held.setdefault(line["pid"], {})
        match line["what"]:
            case "starts":  # this number was another process's, which cannot have said that it ends
                findings += [_leaked(entry, KILLED) for entry in mine.values()]
                mine.clear()
            case "asks":
                findings += _order(line, mine.values(), order)
            case "enters":
                mine[line["record"]] = line
            case "leaves":
                mine.pop(line["record"], None)
            case "outside":
                text = f"{line['work']} of registered state runs outside any phase: {RULES['outside']}"
                findings.append(_finding("outside", line, text))
            case "unheld":
                groups = ", ".join(line["groups"]) or "some group"
                text = f"yields {groups}, which this process does not hold: {RULES['not-held']}"
                findings.append(_finding("not-held", line, text))
            case "exits":
                how = f"its process ended by {line['error']}" if "error" in line else "its process ended"
                findings += [_leaked(entry, how) for entry in mine.values()]
                mine.clear()
            case _:
                pass
    for mine in held.values():
        findings += [_leaked(entry, KILLED) for entry in mine.values()]
    return findings + [_short(phase, swap_s) for phase in phases(lines) if _is_short(phase, swap_s)]


def _order(line: Mapping[str, Any], held: Iterable[Mapping[str, Any]], order: Sequence[str]) -> list[Finding]:
    def rank(group: str) -> tuple[int, str]:
        return (order.index(group) if group in order else len(order), group)

    have = [group for entry in held for group in entry["groups"]]
    wanted = [group for group in line["groups"] if group not in have]
    late = sorted({group for group in have if any(rank(new) < rank(group) for new in wanted)}, key=rank)
    if not late:
        return []
    text = (
        f"asks for {', '.join(wanted)} while it holds {', '.join(late)}, which comes later: "
        f"{RULES['lock-order']}. Yield {', '.join(late)} first, or ask for both in one request"
    )
    return [_finding("lock-order", line, text)]


def _leaked(line: Mapping[str, Any], how: str) -> Finding:
    text = f"{', '.join(line['groups'])} was still held when {how}: {RULES['leak']}. Use a with block"
    return _finding("leak", line, text)


def _is_short(phase: Phase, swap_s: float) -> bool:
    return bool(phase.seconds) and statistics.median(phase.seconds) < swap_s


def _short(phase: Phase, swap_s: float) -> Finding:
    median = statistics.median(phase.seconds)
    text = (
        f"lasts {median:.3g} s (median of {len(phase.seconds)}), a swap {swap_s:g} s: {RULES['short']}. "
        "Put neighbouring phases into one, or keep the accelerators while the next batch is ready"
    )
    return Finding(rule="short", phase=phase.name, where=phase.where, text=text)


def _finding(rule: str, line: Mapping[str, Any], text: str) -> Finding:
    return Finding(rule=rule, phase=line.get("phase", ""), where=line["where"], text=text, pid=line["pid"])


def _key(line: Mapping[str, Any]) -> tuple[int, str, tuple[str, ...], str]:
    return line["pid"], line["phase"], tuple(line["groups"]), line["where"]
