"""Groups onto nodes: largest first, where the fewest accelerators are left over."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.plan.cluster import Cluster
from coslice.plan.model import Group


class Placement(Struct, frozen=True):
    groups: list[Group]
    unplaced: dict[str, str]


def place(groups: Sequence[Group], cluster: Cluster) -> Placement:
    """Give every group its nodes and devices. Sizes that are not known count as one accelerator."""
    names = list(cluster.nodes)
    free = {name: list(range(cluster.gpus_per_node)) for name in names}
    placed: dict[str, Group] = {}
    unplaced: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: -max(1, group.accelerators)):
        nodes = max(1, len(group.nodes))
        each = -(-max(1, group.accelerators) // nodes)
        fitting = sorted(
            (name for name in names if len(free[name]) >= each), key=lambda name: len(free[name])
        )
        while not cluster.nodes and len(fitting) < nodes:
            names.append(name := f"node{len(names) + 1}")
            free[name] = list(range(cluster.gpus_per_node))
            fitting.append(name)
        if len(fitting) < nodes or each > cluster.gpus_per_node:
            room = sum(map(len, free.values()))
            unplaced[group.name] = (
                f"wants {each} accelerators on {nodes} nodes, and {room} are left in the cluster"
            )
            placed[group.name] = replace(group, nodes=())
            continue
        chosen = fitting[:nodes]
        devices = tuple(tuple(free[name][:each]) for name in chosen)
        for name in chosen:
            del free[name][:each]
        placed[group.name] = replace(group, nodes=tuple(chosen), devices=devices)
    return Placement([placed[group.name] for group in groups], unplaced)
