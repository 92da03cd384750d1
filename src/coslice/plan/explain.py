"""A plan in words, for a terminal. Plain text; the command adds colour."""

from collections.abc import Iterator

from coslice.plan.model import Group, Plan

_MANY = 40
"""Groups that are told one by one."""
_TOLD = 12
"""Refused pairs that are."""


def explain(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    shared = [group for group in plan.detail if len(group.members) > 1]
    alone = [group for group in plan.detail if len(group.members) == 1]
    yield (
        f"{len(plan.slowdown)} jobs, {len(shared)} shared groups: {plan.accelerators} accelerators instead "
        f"of {plan.accelerators_alone}; they compute {plan.useful_duty:.1%} of their time instead of "
        f"{plan.useful_duty_alone:.1%}"
    )
    worst = max(plan.slowdown, key=lambda job: plan.slowdown[job])
    yield (
        f"slowdown at most {plan.slowdown[worst]:.2f} x ({worst}), bound {plan.max_slowdown:.2f}; "
        f"{plan.swap}; {plan.method}, {plan.seconds:.2f} s"
    )
    called = plan.names()
    for group in shared[:_MANY]:
        yield ""
        yield from _group(group, called)
    if len(shared) > _MANY:
        yield f"… and {len(shared) - _MANY} more shared groups (--json has all)"
    if alone:
        yield ""
        single = [group.members[0] for group in alone]
        names = [f"{called[one.profile, one.pool]} ({one.duty_alone:.0%})" for one in single]
        yield f"alone: {', '.join(names[:_MANY])}" + (
            f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        )
    yield from _unplaced(plan.unplaced)
    if plan.refused:
        yield ""
        yield from _refused(plan.refused)
    for note in plan.notes:
        yield f"note: {note}"


def _unplaced(unplaced: dict[str, str]) -> Iterator[str]:
    for name, why in list(unplaced.items())[:_TOLD]:
        yield f"no place for {name}: {why}"
    if len(unplaced) > _TOLD:
        yield f"no place for {len(unplaced) - _TOLD} more groups either (--json has all)"


def _refused(refused: dict[str, str]) -> Iterator[str]:
    """What was played and failed first: that is what one may want to change."""
    played = [(pair, why) for pair, why in refused.items() if "would be slowed" in why]
    work = [(pair, why) for pair, why in refused.items() if "together they would" in why]
    told = (played + work)[:_TOLD]
    yield f"refused: {len(refused)} pairs" + (f", of which {len(told)}:" if len(told) < len(refused) else ":")
    for pair, why in told:
        yield f"  {pair}: {why}"
    others = [why for why in refused.values() if "would" not in why]
    sizes = sum("accelerators at a time" in why for why in others)
    if sizes:
        yield f"  {sizes} pairs use different numbers of accelerators at a time"
    for pair, why in [(p, w) for p, w in refused.items() if "would" not in w and "at a time" not in w][
        :_TOLD
    ]:
        yield f"  {pair}: {why}"


def _group(group: Group, called: dict[tuple[str, str], str]) -> Iterator[str]:
    where = ", ".join(
        f"{node} {_devices(devices)}" for node, devices in zip(group.nodes, group.devices, strict=False)
    )
    yield (
        f"{group.name}  {where or 'no place'}   useful duty {group.useful_duty:.1%} of at most "
        f"{group.duty_bound:.1%}, changes of hands {group.swap_duty:.1%}"
    )
    names = [called[member.profile, member.pool] for member in group.members]
    width = max(map(len, names))
    for name, member in zip(names, group.members, strict=True):
        yield (
            f"    {name.ljust(width)}  {member.duty_alone:6.1%} alone, "
            f"{member.useful_duty:6.1%} here, {member.slowdown:.2f} x (bound {member.max_slowdown:.2f})"
        )
    policy = f"; policy {group.policy}" if group.policy else ""
    yield f"    order: {_order(group.order)}{policy}"


def _order(order: tuple[str, ...]) -> str:
    """``a, b x 3, a``."""
    runs: list[tuple[str, int]] = []
    for name in order:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in runs)


def _devices(devices: tuple[int, ...]) -> str:
    if len(devices) > 1 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"GPUs {devices[0]}-{devices[-1]}"
    return f"GPU {', '.join(map(str, devices))}"
