"""Step files: one JSON object a line, phase times as ``gen_s``, ``update_actor_s``, …, ``step_s`` the whole.

An ``index.json`` beside the file, if it lists it, says what ran on what (``gpus``, ``mode``, ``model``).
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from coslice.errors import ConfigError
from coslice.profile.model import Profile, Source
from coslice.profile.number import gibibytes, seconds
from coslice.profile.options import ReadOptions
from coslice.profile.steps import NO_TIME, Row, trainer_pool


def looks_like_steps(text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    return first.startswith("{") and '_s"' in first and ('"step_s"' in first or '"gen_s"' in first)


def read_steps(text: str, name: str, file: str, options: ReadOptions) -> Profile:
    """Raises ``ConfigError`` if no line has times."""
    skipped: Counter[str] = Counter()
    rows: list[Row] = []
    memory = 0.0
    disaggregated = False
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        record = _parse(line)
        if record is None:
            skipped["not a JSON object"] += 1
            continue
        times = {key[:-2]: seconds(value) for key, value in record.items() if _is_time(key, value)}
        row = {timer: value for timer, value in times.items() if value is not None}
        if len(row) < len(times):
            skipped[NO_TIME] += 1
            continue
        if not row:
            skipped["no times"] += 1
            continue
        rows.append(row)
        disaggregated |= "trainer_idle_ratio" in record or "param_sync_s" in record
        memory = max(memory, gibibytes(record.get("actor_max_memory_allocated_gb")))
    if not rows:
        raise ConfigError(f"{file}: no line has phase times (gen_s, update_actor_s, step_s, …)")
    entry = _index_entry(Path(file))
    trainer, notes = trainer_pool(
        rows,
        options,
        disaggregated=disaggregated,
        staleness=_staleness(str(entry.get("mode", ""))),
        state_bytes=int(memory * (1 << 30)),
        accelerators=_trainers(f"{entry.get('gpus', '')}, {entry.get('mode', '')}"),
    )
    if entry:
        words = [str(entry[key]) for key in ("model", "gpus", "mode") if entry.get(key)]
        notes.insert(0, f"index.json: {'; '.join(words)}")
    return Profile(
        name=name,
        pools=(trainer,),
        source=Source(
            kind="steps",
            file=file,
            read=len(lines),
            used=len(rows),
            skipped=dict(skipped),
            notes=tuple(notes),
        ),
    )


def _is_time(key: str, value: object) -> bool:
    """``null`` is a time that was not measured; ``tokens_per_s`` is none."""
    return key.endswith("_s") and not key.endswith("_per_s") and value is not None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _index_entry(file: Path) -> dict[str, Any]:
    try:
        index = json.loads((file.parent / "index.json").read_text())
    except (OSError, ValueError):
        return {}
    entries = index if isinstance(index, list) else []
    return next((e for e in entries if isinstance(e, dict) and e.get("file") == file.name), {})


def _staleness(mode: str) -> float | None:
    if match := re.search(r"stale(?:ness)?\s+(\d+(?:\.\d+)?)", mode):
        return float(match[1])
    # Streaming hands samples over one by one, but none from before the last weights.
    return 0.0 if "on-policy" in mode or "stream" in mode else None


def _trainers(gpus: str) -> int:
    match = re.search(r"\b(\d{1,6}) trainer", gpus)
    return int(match[1]) if match else 0
