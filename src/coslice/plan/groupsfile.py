"""The groups file: what ``coslice plan --out`` writes and ``coslice up --groups`` takes. TOML, for editing.

[[groups]]
name = "g1"
jobs = ["math", "code"]
nodes = ["node1"]
devices = [[0]]            # of each of these nodes
# cpus = [2, 3]            # the host accelerator's cores
# memory = "512MiB"        # and its size
# admission = "enforce"    # off, warn or enforce, in place of coslice up --admission
# max_slowdown = 1.10      # what it goes by
# policy = "fair_share"    # in place of coslice up --policy
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from coslice.core.ids import check_name
from coslice.errors import ConfigError
from coslice.plan.model import Plan


class GroupEntry(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    jobs: list[str] = []
    nodes: list[str] = []
    devices: list[list[int]] = []
    cpus: list[int] = []
    memory: str = ""
    admission: str = ""
    max_slowdown: float = 0.0
    policy: str = ""


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    groups: list[GroupEntry]


def format_groups(plan: Plan) -> str:
    """Groups that the cluster has no room for are left out, with a comment."""
    lines = [
        f"# Which jobs take turns, by coslice plan: slowdown at most {plan.max_slowdown:g}, {plan.swap}.",
        "# Start them with: coslice up --groups THIS (several nodes: coslice orchestrator --groups THIS,",
        "# and on each coslice agent --groups THIS); then: coslice run --group NAME --job JOB -- …",
    ]
    called = plan.names()
    for group in plan.detail:
        names = [called[member.profile, member.pool] for member in group.members]
        if (why := plan.unplaced.get(group.name)) is not None:
            lines += [
                "",
                f"# {group.name} ({', '.join(names)}) has no place: {why}",
            ]
            continue
        slow = ", ".join(f"{n} {m.slowdown:.2f} x" for n, m in zip(names, group.members, strict=True))
        bounds = {member.max_slowdown for member in group.members}
        if len(bounds) > 1:
            told = ", ".join(f"{m.profile} {m.max_slowdown:g}" for m in group.members)
            slow += f". Bounds: {told}; admission goes by the loosest"
        lines += [
            "",
            f"# useful duty {group.useful_duty:.1%} of at most {group.duty_bound:.1%}; {slow}",
            "[[groups]]",
            f"name = {json.dumps(group.name)}",
            f"max_slowdown = {max(bounds):g}",
            *([f"policy = {json.dumps(group.policy)}"] if group.policy else []),
            f"jobs = {json.dumps([member.profile for member in group.members])}",
            f"nodes = {json.dumps(list(group.nodes))}",
            f"devices = {json.dumps([list(devices) for devices in group.devices])}",
        ]
    return "\n".join(lines) + "\n"


def read_groups(path: Path) -> list[GroupEntry]:
    """Raises ``ConfigError`` naming the file, and the group if it is one's."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8-sig")), _File).groups
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: not a groups file (coslice plan --out writes one): {error}") from None
    if not found:
        raise ConfigError(f"{path}: there is no group in it")
    for group in found:
        try:
            check_name("group", group.name)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    return found


def group_options(path: Path, node: str) -> list[str]:
    """The groups of one node, as ``coslice up --group`` takes them. A node that the file does not name runs
    them all, if they are all for one node. Raises ``ConfigError``."""
    groups = read_groups(path)
    named = sorted({name for group in groups for name in group.nodes})
    if node in named:
        groups = [group for group in groups if node in group.nodes]
    elif len(named) > 1:
        raise ConfigError(
            f"{path} is for the nodes {', '.join(named)}, and this is {node}: run coslice orchestrator, and "
            "on each node coslice agent --node NAME, both with --groups FILE; or name this node in it"
        )
    return _options(groups)


def every_option(path: Path) -> list[str]:
    """The groups of all nodes, in the same form. Raises ``ConfigError``."""
    return _options(read_groups(path))


def _options(groups: Iterable[GroupEntry]) -> list[str]:
    options = []
    for group in groups:
        option = group.name
        if group.cpus:
            option += f":cpus={','.join(map(str, group.cpus))}"
        if group.memory:
            option += f":memory={group.memory}"
        if group.admission:
            option += f":admission={group.admission}"
        if group.max_slowdown:
            option += f":max_slowdown={group.max_slowdown:g}"
        if group.policy:
            option += f":policy={group.policy}"  # the last: it may have colons of its own
        options.append(option)
    return options
