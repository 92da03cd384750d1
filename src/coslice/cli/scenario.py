"""``coslice simulate --scenario FILE``: whole clusters, written by people. What cannot be is said by name."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from coslice.core.ids import check_name
from coslice.core.policy import policy_named
from coslice.errors import ConfigError
from coslice.profile.number import LONGEST, seconds
from coslice.simulate.spec import Drift, Faults, Job, Pool, Scenario, Stretch, SwapCost

_PARTS: dict[str, type[Struct]] = {
    "pools": Pool, "jobs": Job, "cost": SwapCost, "faults": Faults, "drift": Drift, "loop": Stretch,
    "produce": Stretch,
}  # fmt: skip
MOST_NODES = 100_000
MOST_A_HOUR = 3600.0
"""Faults, of each job or node: more of them, and nothing else would happen."""


def read_scenario(path: Path) -> Scenario:
    """Raises ``ConfigError`` naming the file."""
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=Scenario)
        wrong = next(_wrong(found, msgspec.json.decode(data)), None)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a scenario ({error}); docs/policies.md has an example") from None
    except ValueError as error:  # of a policy or a name
        raise ConfigError(f"{path}: {error}") from None
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    return found


def _wrong(found: Scenario, data: dict[str, Any]) -> Iterator[str]:
    """In words. Raises ``ValueError`` for names and policies."""
    yield from _unknown(data, Scenario, "the scenario")
    if not found.jobs:
        yield "there is no job in it"
    names = [pool.name for pool in found.pools]
    if twice := {name for name in names if names.count(name) > 1}:
        yield f"two pools have one name: {', '.join(sorted(twice))}"
    for text in (found.policy, *(pool.policy for pool in found.pools if pool.policy)):
        policy_named(text)
    for pool in found.pools:
        check_name("pool", pool.name)
        if not 1 <= pool.nodes <= MOST_NODES or pool.gpus < 1 or pool.device < 0 or pool.host < 0:
            yield f"pool {pool.name}: nodes and gpus are 1 or more, device and host 0 or more bytes"
    for job in found.jobs:
        check_name("job", job.name)
        if min(job.bytes, job.need, job.steps) < 0 or seconds(job.arrival) is None:
            yield f"job {job.name}: bytes, need, steps and arrival are 0 or more"
        if not 0 <= job.staleness <= LONGEST:
            yield f"job {job.name}: staleness is 0 or more batches"
    cost, faults = found.cost, found.faults
    if None in map(seconds, (cost.out_s, cost.in_s, cost.handoff_s, cost.message_s)):
        yield "cost: seconds are 0 or more"
    if not (cost.out_rate > 0 and cost.in_rate > 0 and 0 <= cost.overlap <= 1):
        yield "cost: rates are bytes a second, above 0; overlap is a share from 0 to 1"
    if not (0 <= faults.crashes <= MOST_A_HOUR and 0 <= faults.outages <= MOST_A_HOUR):
        yield f"faults: crashes and outages are numbers per hour, from 0 to {MOST_A_HOUR:g}"
    if None in map(seconds, (faults.restart_s, faults.outage_s)) or not 0 <= faults.failed_moves <= 1:
        yield "faults: seconds are 0 or more, failed_moves is a share from 0 to 1"
    if None in map(seconds, (found.until, found.warmup)) or (found.until and found.warmup >= found.until):
        yield "until and warmup are 0 or more seconds, and warmup ends before until"
    if not 0 < found.max_hold < math.inf:
        yield "max_hold: seconds, above 0"


def _unknown(value: object, kind: type[Struct], where: str) -> Iterator[str]:
    """Fields that nobody reads: a misspelt one would be passed over in silence."""
    if isinstance(value, list):
        for item in value:
            yield from _unknown(item, kind, where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in kind.__struct_fields__:
                yield f"{where}: there is no field {key!r}; known are {', '.join(kind.__struct_fields__)}"
            elif key in _PARTS:
                yield from _unknown(inner, _PARTS[key], key)
