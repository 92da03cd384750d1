"""Who may not share with whom, before anything is predicted; and the words for every refusal."""

from collections.abc import Callable, Sequence

from coslice.plan.cluster import Cluster
from coslice.plan.units import Unit
from coslice.sizes import format_size

Rule = Callable[[Unit, Unit], str]


def unfit(unit: Unit, cluster: Cluster) -> str:
    """Why a unit does not fit the cluster even alone; empty: it fits."""
    need = unit.device_bytes or unit.state_bytes
    if cluster.device_memory and need > cluster.device_memory:
        return (
            f"needs {format_size(need)} on an accelerator, and the cluster's have "
            f"{format_size(cluster.device_memory)}"
        )
    if cluster.nodes and unit.nodes > len(cluster.nodes):
        return f"needs {unit.nodes} nodes, and the cluster has {len(cluster.nodes)}"
    if cluster.host_memory and host_bytes(unit) > cluster.host_memory:
        return f"has a saved state of {format_size(host_bytes(unit))} a node, more than the host's memory"
    return ""


def host_bytes(unit: Unit) -> int:
    """Of one node, for the saved state of the unit."""
    return unit.state_bytes * max(1, -(-unit.accelerators // unit.nodes))


def never(one: Unit, other: Unit, cluster: Cluster) -> str:
    """Why two units cannot share whatever their phases are; empty: they may."""
    if one.job == other.job:
        return "two pools of one job: it runs on one set of accelerators if it is started colocated"
    if cluster.host_memory and (both := host_bytes(one) + host_bytes(other)) > cluster.host_memory:
        return (
            f"their saved states take {format_size(both)} of a node's memory, and there are "
            f"{format_size(cluster.host_memory)}"
        )
    return ""


def fits_host(units: Sequence[Unit], cluster: Cluster) -> bool:
    return not cluster.host_memory or sum(map(host_bytes, units)) <= cluster.host_memory


def too_much(one: Unit, other: Unit) -> str:
    """The work bound: jobs that together want more than the accelerators have slow down by that factor, on
    average, whoever goes first. Empty: within the bounds."""
    load = one.duty / one.max_slowdown + other.duty / other.max_slowdown
    if load <= 1.0:
        return ""
    total = one.duty + other.duty
    return (
        f"together they would compute {total:.1%} of the time: that slows them down {total:.3f} x on "
        f"average, and the bound is {max(one.max_slowdown, other.max_slowdown):.2f}"
    )


def too_slow(one: Unit, other: Unit, slowdown: Sequence[float]) -> str:
    """In words, what the prediction found; the unit that exceeds its bound most."""
    pairs = sorted(
        zip((one, other), (other, one), slowdown, strict=False),
        key=lambda entry: entry[2] / entry[0].max_slowdown,
        reverse=True,
    )
    victim, partner, value = pairs[0]
    block, room = partner.turn_s, _room(victim)
    swap = one.out_s + other.in_s
    why = ""
    if not victim.buffered and block + 2 * swap > room:
        why = f": {partner.job} holds for {block:.0f} s at a time, and {victim.job} is off for {room:.0f} s"
        why += f" (swaps take {swap:.3g} s)" if swap else ""
    bound = victim.max_slowdown
    digits = 2 if f"{value:.2f}" != f"{bound:.2f}" else 4
    return f"{victim.job} would be slowed down {value:.{digits}f} x, and its bound is {bound:.2f}{why}"


def _room(unit: Unit) -> float:
    return unit.period * (1.0 - unit.duty)
