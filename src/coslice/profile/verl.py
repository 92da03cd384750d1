"""veRL training logs: console lines (``step:7 - actor/loss:0.1 - timing_s/gen:12.3 - …``) and its JSON-lines
file logger, of the colocated, legacy, one-step-off and fully-async trainers, and of its first versions.

Sources of the names: the logs themselves. A fully-async run prints two lines per step: the trainer's, with
``timing_s/``, and the rollouter's, with ``fully_async/rollouter/``; from the second comes the sampler's pool.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping

from coslice.errors import ConfigError
from coslice.profile.model import Phase, Pool, Profile, Source, durations, make_pool
from coslice.profile.number import gibibytes, seconds
from coslice.profile.options import ReadOptions
from coslice.profile.steps import NO_TIME, Row, nested, trainer_pool, trend

_COLOUR = re.compile(r"(?:\x1b)?\[[0-9;]*m")
_STEP = re.compile(r"(?:^|[\s)\]])step:\s*(\d{1,18}) - ")
_NUMBER = re.compile(r"(?:np\.\w+\()?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\)?")
_TIMING = ("timing_s/", "timing/")
"""The second is of the first versions, which do not measure the step as a whole."""
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
"""What ray puts behind a line that several workers wrote."""
_PART = re.compile(r"(?:^|\s)(?:- )?(?:timing_s|timing)?/\w+:[\d.]+(?:e-?\d+)?(?: - |$)")
_ROLLOUTER = "fully_async/rollouter/"


def looks_like_verl(text: str) -> bool:
    return any(prefix in text for prefix in _TIMING) and (_STEP.search(text) is not None or '"data"' in text)


def read_verl(text: str, name: str, file: str, options: ReadOptions) -> Profile:
    """Raises ``ConfigError`` if there is no step in the log."""
    skipped: Counter[str] = Counter()
    steps: list[Row] = []
    rollouts: list[Mapping[str, float]] = []
    facts: dict[str, float] = {}
    seen: set[str] = set()
    lines = [line for line in text.splitlines() if line.strip()]
    used, last, restarts = 0, -1, 0
    for line in lines:
        found = _metrics(line)
        if found is None:
            skipped[_kind(line)] += 1
            continue
        step, metrics, key = found
        if key in seen:
            skipped["repeated lines"] += 1
            continue
        seen.add(key)
        times = {_timer(key): value for key, value in metrics.items() if key.startswith(_TIMING)}
        wrong = {timer for timer, value in times.items() if seconds(value) is None}
        if not all(map(nested, wrong)) or None in map(seconds, _rollout(metrics)):
            skipped[NO_TIME] += 1
            continue
        times = {timer: value for timer, value in times.items() if timer not in wrong}
        if "step" in times or any(timer in times for timer in ("gen", "update_actor")):
            steps.append(times)
            restarts += step <= last
            last, used = step, used + 1
            _remember(facts, metrics)
        elif _ROLLOUTER + "version_time" in metrics:
            if step == 0:
                skipped["the rollouter's start-up (step 0)"] += 1
            else:
                rollouts.append(metrics)
                used += 1
        else:
            skipped["step lines without times"] += 1
    if not steps:
        raise ConfigError(
            f"{file}: a veRL log, but no line has the times of a step (timing_s/…), of {len(lines)}: "
            f"{', '.join(f'{count} {reason}' for reason, count in skipped.items())}. "
            "Run with trainer.logger including 'console' or 'file'"
        )
    asynchronous = (
        "staleness" in facts or "asynchronous" in facts or any("param_sync" in row for row in steps)
    )
    trainer, notes = trainer_pool(
        steps,
        options,
        disaggregated=asynchronous or any("wait_prev_gen" in row for row in steps),
        staleness=facts.get("staleness"),
        state_bytes=int(facts.get("allocated", 0.0) * (1 << 30)),
        device_bytes=int(facts.get("reserved", 0.0) * (1 << 30)),
    )
    if not any("step" in row for row in steps):
        notes.append(
            "the log has no time of a whole step: what no timer measured, such as rewards, is not in it"
        )
    if skipped[_CUT]:
        notes.append("lines of steps are cut or wrapped: their steps look shorter than they were")
    if restarts:
        notes.append(f"step numbers go back {restarts} times: several runs in one file, all of them counted")
    pools = [trainer]
    if rollouts and trainer.role == "trainer":
        pools.append(sampler := _sampler(rollouts))
        notes += trend(sampler)
    return Profile(
        name=name,
        pools=tuple(pools),
        source=Source(
            kind="verl", file=file, read=len(lines), used=used, skipped=dict(+skipped), notes=tuple(notes)
        ),
    )


def _sampler(rollouts: list[Mapping[str, float]]) -> Pool:
    """What the rollouter says of each version of the weights: it worked, then it stood still, being too far
    ahead of the trainer (or waiting for weights)."""
    active, whole = zip(*map(_rollout, rollouts), strict=True)
    idle = [max(0.0, total - busy) for total, busy in zip(whole, active, strict=True)]
    return make_pool(
        "sampler",
        [
            Phase(name="rollouter active", phase="generate", on=True, duration=durations(active)),
            Phase(name="rollouter idle", on=False, duration=durations(idle)),
        ],
    )


def _rollout(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Seconds: active, and in all."""
    return metrics.get(_ROLLOUTER + "active_time", 0.0), metrics.get(_ROLLOUTER + "version_time", 0.0)


def _metrics(line: str) -> tuple[int, dict[str, float], str] | None:
    """Step, numbers, and the text that identifies the line. None: not a line of metrics."""
    if line.lstrip().startswith("{"):
        return _json_metrics(line)
    text = _REPEATED.sub("", _COLOUR.sub("", line))
    if (match := _STEP.search(text)) is None:
        return None
    body = text[match.end() :]
    metrics: dict[str, float] = {}
    for part in body.split(" - "):
        key, _, value = part.strip().rpartition(":")
        if key and (number := _NUMBER.fullmatch(value.strip())) is not None:
            metrics[key] = float(number[1])
        elif _is_time(key) and value.strip() != "None":
            metrics[key] = math.nan
    return int(match[1]), metrics, f"{match[1]} {body}"


def _json_metrics(line: str) -> tuple[int, dict[str, float], str] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    data = record.get("data") if isinstance(record, dict) else None
    if not isinstance(data, dict):
        return None
    metrics: dict[str, float] = {}
    for key, value in data.items():
        known = seconds(value)
        if known is not None:
            metrics[key] = known
        elif _is_time(key) and value is not None:
            metrics[key] = math.nan
    step = record.get("step", 0)
    return step if isinstance(step, int) else 0, metrics, line


def _is_time(key: str) -> bool:
    return key.startswith(_TIMING) or key in (_ROLLOUTER + "active_time", _ROLLOUTER + "version_time")


def _timer(key: str) -> str:
    """``timing_s/gen`` → ``gen``; one version writes ``timing_s/timing_s/param_sync``."""
    while key.startswith(_TIMING):
        key = key.partition("/")[2]
    return key


_CUT = "parts of step lines, which are wrapped or cut"


def _kind(line: str) -> str:
    """Of a line that is none of a step."""
    if "timing_s/param_sync:" in line:
        return "parameter-sync lines (their time is in the step)"
    return _CUT if _PART.search(_COLOUR.sub("", line)) else "not step lines"


def _remember(facts: dict[str, float], metrics: Mapping[str, float]) -> None:
    for key, fact in (
        ("max_memory_allocated_gb", "allocated"),
        ("max_memory_reserved_gb", "reserved"),
    ):
        for prefix in ("actor/perf/", "perf/"):
            facts[fact] = max(facts.get(fact, 0.0), gibibytes(metrics.get(prefix + key, 0.0)))
    if (staleness := seconds(metrics.get("fully_async/static/staleness_threshold"))) is not None:
        facts["staleness"] = round(staleness, 6)
    if any(key.startswith("fully_async/") for key in metrics):
        facts["asynchronous"] = 1.0
