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
    rooms = _Rooms(cluster)
    placed: dict[str, Group] = {}
    unplaced: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: -max(1, group.accelerators)):
        nodes = max(1, len(group.nodes))
        each = -(-max(1, group.accelerators) // nodes)
        if (chosen := rooms.take(nodes, each)) is None:
            unplaced[group.name] = (
                f"wants {each} accelerators on {nodes} nodes, and {rooms.left()} are left in the cluster"
            )
            placed[group.name] = replace(group, nodes=())
        else:
            names, devices = zip(*chosen, strict=True)
            placed[group.name] = replace(group, nodes=names, devices=devices)
    return Placement([placed[group.name] for group in groups], unplaced)


class _Rooms:
    """Nodes by how many of their accelerators are free."""

    def __init__(self, cluster: Cluster) -> None:
        self._size, self._endless = cluster.gpus_per_node, not cluster.nodes
        self._by_room: list[list[str]] = [[] for _ in range(self._size + 1)]
        self._by_room[self._size] = list(reversed(cluster.nodes))
        self._made = 0

    def take(self, nodes: int, each: int) -> list[tuple[str, tuple[int, ...]]] | None:
        """``each`` accelerators on so many nodes, where the fewest are left over. None: no room."""
        if each > self._size:
            return None
        found: list[tuple[str, int]] = []
        for room in range(each, self._size + 1):
            while self._by_room[room] and len(found) < nodes:
                found.append((self._by_room[room].pop(), room))
        while self._endless and len(found) < nodes:
            self._made += 1
            found.append((f"node{self._made}", self._size))
        enough = len(found) == nodes
        for name, room in reversed(found):
            self._by_room[room - each if enough else room].append(name)
        if not enough:
            return None
        return [(name, tuple(range(self._size - room, self._size - room + each))) for name, room in found]

    def left(self) -> int:
        return sum(room * len(names) for room, names in enumerate(self._by_room))
