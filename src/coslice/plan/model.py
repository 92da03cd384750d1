"""The plan: what goes where, what it costs whom, and what was refused. ``coslice plan`` writes it as JSON."""

from collections import Counter

from msgspec import Struct


class Member(Struct, frozen=True, kw_only=True):
    """One pool of one job in a group. Duties are shares of the group's time."""

    profile: str
    pool: str
    duty_alone: float
    useful_duty: float
    slowdown: float
    max_slowdown: float


class Group(Struct, frozen=True, kw_only=True):
    name: str
    members: tuple[Member, ...]
    order: tuple[str, ...]
    """Whose turns follow each other, in one cycle of the slowest (as predicted, first come first served)."""
    policy: str
    """Under which the slowdowns hold, and which the groups file asks for; empty: any does the same."""
    useful_duty: float
    duty_bound: float
    """min(1, Σ alone): no schedule passes it."""
    swap_duty: float
    """Share of time that changes of hands take."""
    accelerators: int
    """0: not known."""
    nodes: tuple[str, ...] = ()
    devices: tuple[tuple[int, ...], ...] = ()
    """Of each of these nodes. Pools of unknown size count as one accelerator."""


class Plan(Struct, frozen=True, kw_only=True):
    groups: tuple[tuple[str, ...], ...]
    """Names of profiles. A job with several pools is in a group for each."""
    useful_duty: float
    """Share of all used accelerators' time in which they compute for a job."""
    slowdown: dict[str, float]
    """Of each job: its predicted step time ÷ its step time alone."""
    refused: dict[str, str]
    """``a + b`` → why they cannot share. Of many jobs, those pairs that looked promising only."""
    seconds: float
    useful_duty_alone: float
    """The same jobs, each with accelerators of its own."""
    accelerators: int
    accelerators_alone: int
    max_slowdown: float
    swap: str
    method: str
    """``exact``, or how it was searched."""
    unplaced: dict[str, str]
    """Group → why the cluster has no room for it."""
    notes: tuple[str, ...]
    detail: tuple[Group, ...]

    def names(self) -> dict[tuple[str, str], str]:
        """(profile, pool) → what people read: of a job with several pools with the pool."""
        pools = [(member.profile, member.pool) for group in self.detail for member in group.members]
        count = Counter(profile for profile, _ in pools)
        return {(name, pool): name if count[name] == 1 else f"{name}:{pool}" for name, pool in pools}
