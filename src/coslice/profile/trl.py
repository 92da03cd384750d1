"""What a Hugging Face trainer leaves behind: ``trainer_state.json``, its ``log_history`` as JSON lines, or
what it printed (``{'loss': 0.1, 'step_time': 10.5, …}``, among progress bars and other lines).

TRL's trainers log ``step_time`` and, where profiling metrics are recorded, ``profiling/Time taken:
Class.method`` of their methods. Of these, the innermost that we know are phases; the rest of a step is
``other``. Without them only the length of a step is known, and nothing of what is idle in it.
"""

import json
import re
from collections import Counter
from typing import Any

from coslice.errors import ConfigError
from coslice.profile.model import Profile, Source
from coslice.profile.number import seconds
from coslice.profile.options import ReadOptions
from coslice.profile.steps import NO_TIME, trainer_pool

_PROFILING = "profiling/Time taken: "
# method → timer of steps.TIMERS. Methods that contain others (_prepare_inputs, compute_loss, …) are left out.
_METHODS = {
    "vLLM.generate": "gen",
    "transformers.generate": "gen",
    "transformers.generate_batch": "gen",
    "generate": "gen",
    "_generate_single_turn": "gen",
    "_calculate_rewards": "reward",
    "_move_model_to_vllm": "weight_sync",
    "sync_weights": "weight_sync",
}


_PRINTED = re.compile(r"\{'[^{}]*\}")
_PRINTED_PAIR = re.compile(r"'([^']+)': '?([-+.\w]+)'?")


def looks_like_trl(text: str) -> bool:
    if "'step_time': " in text or "'train_runtime': " in text:
        return True
    head = text.lstrip()[:1]
    return head in "{[" and ('"log_history"' in text or '"train_runtime"' in text or '"step_time"' in text)


def read_trl(text: str, name: str, file: str, options: ReadOptions) -> Profile:
    """Raises ``ConfigError`` if no entry says how long a step took."""
    entries, broken = _entries(text, file)
    skipped: Counter[str] = Counter({"not a log entry": broken} if broken else {})
    rows: list[dict[str, float]] = []
    total = steps = 0.0
    unknown: set[str] = set()
    for entry in entries:
        row = _row(entry, unknown)
        if row is None:
            skipped[NO_TIME] += 1
        elif row:
            rows.append(row)
        elif "train_runtime" in entry:
            total, steps = seconds(entry["train_runtime"]) or 0.0, seconds(entry.get("step")) or 0.0
            skipped["the summary at the end"] += 1
        elif any(key.startswith("eval_") for key in entry):
            skipped["evaluations"] += 1
        else:
            skipped["entries without times"] += 1
    notes: list[str] = []
    if not rows:
        if not (total and steps):
            raise ConfigError(
                f"{file}: a trainer's log without times: neither step_time nor {_PROFILING.strip()!r} nor "
                "train_runtime. TRL's own trainers write step_time; or profile the GPU's utilisation instead"
            )
        rows = [{"step": total / steps}]
        skipped.pop("the summary at the end", None)
        notes.append(f"no times of single steps: {total:.0f} s of training over {steps:.0f} steps")
    pool, more = trainer_pool(rows, options, disaggregated=False)
    if all(phase.name == "other" for phase in pool.phases):
        notes.append(
            "the log says how long a step takes, not what is idle in it: all of it counts as on. A record "
            "of the GPU's utilisation tells (nvidia-smi --query-gpu=… --format=csv -lms 500)"
        )
        more = [note for note in more if not note.startswith("'other'")]
    elif pool.role == "both":
        notes.append("generation is taken to run on the trainer's accelerators; say --disaggregated if not")
    if unknown:
        notes.append(f"timed methods that contain others, not counted again: {', '.join(sorted(unknown))}")
    return Profile(
        name=name,
        pools=(pool,),
        source=Source(
            kind="trl",
            file=file,
            read=len(entries) + broken,
            used=len(entries) + broken - sum(skipped.values()),
            skipped=dict(skipped),
            notes=tuple(notes + more),
        ),
    )


def _row(entry: dict[str, Any], unknown: set[str]) -> dict[str, float] | None:
    """None: one of its times is none."""
    row: dict[str, float] = {}
    for key, value in entry.items():
        key = key.removeprefix("train/")
        method = key[len(_PROFILING) :].split(".", 1)[-1] if key.startswith(_PROFILING) else ""
        timer = "step" if key == "step_time" else _METHODS.get(method)
        if timer is None and method:
            unknown.add(method)
        if timer is None or value is None:
            continue
        if (spent := seconds(value)) is None:
            return None
        row[timer] = row.get(timer, 0.0) + spent
    return row


def _entries(text: str, file: str) -> tuple[list[dict[str, Any]], int]:
    """The entries, and how many lines are none."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        whole = whole["log_history"]
    if isinstance(whole, list):
        entries = [entry for entry in whole if isinstance(entry, dict)]
        return entries, len(whole) - len(entries)
    entries, broken = [], 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        record = record if isinstance(record, dict) else _printed(line)
        if record is not None:
            entries.append(record)
        else:
            broken += 1
    if not entries:
        raise ConfigError(f"{file}: neither a trainer_state.json nor log entries in JSON or as printed")
    return entries, broken


def _printed(line: str) -> dict[str, Any] | None:
    """Of a dictionary as Python prints it, the numbers (some versions print them as text)."""
    if (found := _PRINTED.search(line)) is None:
        return None
    entry: dict[str, Any] = {}
    for key, value in _PRINTED_PAIR.findall(found[0]):
        try:
            entry[key] = float(value)
        except ValueError:
            continue
    return entry
