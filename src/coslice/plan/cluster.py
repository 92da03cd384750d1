"""The cluster a plan is for: a small TOML (or JSON) file, every setting optional.

nodes = 4                  # or names: ["gpu-a", "gpu-b"]; all alike; without it there is no limit
gpus_per_node = 8
device_memory = "80GB"     # of each accelerator; without it: not checked
host_memory = "1TB"        # of each node, for saved state; without it: not checked
swap_s = 10                # one change of hands; or by bytes: swap_bandwidth = "20GB" (a second, each way)

[jobs.code]                # what a job may be slowed down by, where it is not --max-slowdown
max_slowdown = 1.3
"""

import json
import math
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from coslice.core.ids import check_name
from coslice.errors import ConfigError
from coslice.profile.model import Pool
from coslice.profile.number import seconds
from coslice.sizes import parse_size

DEFAULT_SWAP_S = 10.0
MOST_NODES = 100_000


class JobRules(Struct, frozen=True, forbid_unknown_fields=True):
    max_slowdown: float | None = None


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    nodes: int | list[str] = 0
    gpus_per_node: int = 8
    device_memory: str | int = 0
    host_memory: str | int = 0
    swap_s: float | None = None
    swap_bandwidth: str | int = 0
    jobs: dict[str, JobRules] = {}


class Cluster(Struct, frozen=True, kw_only=True):
    """Bytes and seconds. ``nodes`` empty: as many as it takes."""

    nodes: tuple[str, ...] = ()
    gpus_per_node: int = 8
    device_memory: int = 0
    host_memory: int = 0
    swap_s: float = DEFAULT_SWAP_S
    swap_bandwidth: int = 0
    """Per accelerator, in bytes a second each way; 0: a change of hands takes ``swap_s`` whatever moves."""
    jobs: dict[str, JobRules] = {}

    def move_s(self, pool: Pool) -> float:
        """One way, in or out, in seconds."""
        if self.swap_bandwidth and pool.state_bytes:
            return pool.state_bytes / self.swap_bandwidth
        return self.swap_s / 2

    def nodes_of(self, pool: Pool) -> int:
        return max(pool.nodes, -(-pool.accelerators // self.gpus_per_node), 1)


def load_cluster(path: Path | None, *, swap_s: float | None = None) -> Cluster:
    """``swap_s`` wins over the file's. Raises ``ConfigError`` naming file and field."""
    found = _read(path) if path is not None else _File()
    try:
        names = _nodes(found.nodes)
        _check(found)
        device, host, rate = map(_size, (found.device_memory, found.host_memory, found.swap_bandwidth))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
    one = swap_s if swap_s is not None else found.swap_s
    return Cluster(
        nodes=names,
        gpus_per_node=found.gpus_per_node,
        device_memory=device,
        host_memory=host,
        swap_s=DEFAULT_SWAP_S if one is None else one,
        swap_bandwidth=0 if swap_s is not None else rate,
        jobs=found.jobs,
    )


def _read(path: Path) -> _File:
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return msgspec.convert(data, _File)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        known = ", ".join(_File.__struct_fields__)
        raise ConfigError(f"{path}: not a cluster file: {error}. Settings: {known}") from None


def _nodes(nodes: int | list[str]) -> tuple[str, ...]:
    """Raises ``ValueError``."""
    if isinstance(nodes, int):
        if not 0 <= nodes <= MOST_NODES:
            raise ValueError(f"nodes = {nodes}: a number from 0 (as many as it takes) to {MOST_NODES}")
        return tuple(f"node{number + 1}" for number in range(nodes))
    if twice := sorted({name for name in nodes if nodes.count(name) > 1}):
        raise ValueError(f"nodes: {', '.join(twice)} is named twice")
    return tuple(check_name("node", name) for name in nodes)


def _check(found: _File) -> None:
    """Raises ``ValueError``."""
    if found.gpus_per_node < 1:
        raise ValueError(f"gpus_per_node = {found.gpus_per_node}: at least 1")
    if found.swap_s is not None and seconds(found.swap_s) is None:
        raise ValueError(f"swap_s = {found.swap_s:g}: 0 or more seconds")
    for name in ("device_memory", "host_memory", "swap_bandwidth"):
        size = getattr(found, name)
        if isinstance(size, int) and size < 0:
            raise ValueError(f"{name} = {size}: 0 (not checked) or more bytes")
    for job, rules in found.jobs.items():
        bound = rules.max_slowdown
        if bound is not None and not 1.0 <= bound < math.inf:
            raise ValueError(f"max_slowdown of {job} = {bound:g}: a ratio to the time alone, 1 or more")


def _size(value: str | int) -> int:
    return parse_size(value) if isinstance(value, str) else value
