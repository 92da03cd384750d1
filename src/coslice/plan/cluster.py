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
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from coslice.errors import ConfigError
from coslice.profile.model import Pool
from coslice.sizes import parse_size

DEFAULT_SWAP_S = 10.0


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
    names = [f"node{n + 1}" for n in range(found.nodes)] if isinstance(found.nodes, int) else found.nodes
    seconds = swap_s if swap_s is not None else found.swap_s
    if found.gpus_per_node < 1 or (seconds is not None and seconds < 0):
        raise ConfigError(f"{path}: gpus_per_node is at least 1, swap_s at least 0")
    return Cluster(
        nodes=tuple(names),
        gpus_per_node=found.gpus_per_node,
        device_memory=_size(found.device_memory),
        host_memory=_size(found.host_memory),
        swap_s=DEFAULT_SWAP_S if seconds is None else seconds,
        swap_bandwidth=0 if swap_s is not None else _size(found.swap_bandwidth),
        jobs=found.jobs,
    )


def _read(path: Path) -> _File:
    try:
        text = path.read_text()
        data = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        return msgspec.convert(data, _File)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        known = ", ".join(_File.__struct_fields__)
        raise ConfigError(f"{path}: not a cluster file: {error}. Settings: {known}") from None


def _size(value: str | int) -> int:
    return parse_size(value) if isinstance(value, str) else value
