"""A plan as a picture: a lane for each shared group, a block for each turn, over three of its longest cycles.

SVG by hand: a few rectangles and words need no library. As ``.html`` with the words of the plan under it.
"""

from collections.abc import Mapping, Sequence
from html import escape

from coslice.plan.explain import explain
from coslice.plan.model import Plan
from coslice.plan.predict import Played, predict
from coslice.plan.units import Unit

_WIDTH, _LANE, _LEFT, _TOP = 1100, 26, 190, 44
_COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#2c7a7b", "#c53030")
_CYCLES = 3.0
_SETTLE = 8.0
"""Cycles that are played before the picture begins."""


def svg(plan: Plan, units: Sequence[Unit], *, most: int = 60) -> str:
    """``units``: as ``planner.units_of`` gives them. At most ``most`` groups are drawn, and it is said."""
    of = {(unit.job, unit.pool): unit for unit in units}
    called = plan.names()
    shared = [group for group in plan.detail if len(group.members) > 1]
    body: list[str] = []
    y = _TOP
    for group in shared[:most]:
        members = [of[(member.profile, member.pool)] for member in group.members]
        body.append(_lane(y, f"{group.name}  {group.useful_duty:.0%} useful", members, called))
        y += _LANE + 10 + 15 * len(members)
    if not shared:
        body.append(_text(_LEFT, y + 14, "no two jobs can share within the bound"))
        y += _LANE
    if len(shared) > most:
        body.append(_text(_LEFT, y + 14, f"… and {len(shared) - most} more groups"))
        y += _LANE
    title = (
        f"{len(plan.slowdown)} jobs on {plan.accelerators} accelerators instead of "
        f"{plan.accelerators_alone}: useful duty {plan.useful_duty_alone:.0%} → {plan.useful_duty:.0%}, "
        f"slowdown at most {max(plan.slowdown.values()):.2f} x"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 20}" '
        f'viewBox="0 0 {_WIDTH} {y + 20}" font-family="system-ui, sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        f"{_text(12, 22, title, bold=True)}{''.join(body)}</svg>\n"
    )


def page(plan: Plan, units: Sequence[Unit]) -> str:
    return (
        '<!doctype html><meta charset="utf-8"><title>coslice plan</title>'
        '<body style="font-family: system-ui, sans-serif; margin: 1.5em">'
        f"{svg(plan, units)}<pre>{escape(explain(plan))}</pre></body>\n"
    )


def _lane(y: int, name: str, members: Sequence[Unit], called: Mapping[tuple[str, str], str]) -> str:
    longest = max(unit.period for unit in members)
    turns = sum(longest / unit.period * len(unit.turns) / len(unit.solo_ends) for unit in members)
    played: list[Played] = []
    predict(members, turns=int((_SETTLE + _CYCLES + 2) * turns) + 8, record=played)
    begin = next((turn.start for turn in played if turn.start >= _SETTLE * longest), played[-1].start)
    end = begin + _CYCLES * longest
    scale = (_WIDTH - _LEFT - 20) / (end - begin)
    parts = [
        _text(12, y + 17, name),
        f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 20}" height="{_LANE}" fill="#edf2f7"/>',
    ]
    for turn in played:
        for start, stop, colour in (
            (turn.start - turn.swap, turn.start, "#a0aec0"),
            (turn.start, turn.end, _COLOURS[turn.unit % len(_COLOURS)]),
        ):
            left, right = max(start, begin), min(stop, end)
            if right > left:
                parts.append(
                    f'<rect x="{_LEFT + (left - begin) * scale:.1f}" y="{y}" '
                    f'width="{max(0.5, (right - left) * scale):.1f}" height="{_LANE}" fill="{colour}">'
                    f"<title>{escape(members[turn.unit].job)}: {turn.end - turn.start:.4g} s</title></rect>"
                )
    for number, unit in enumerate(members):
        below = y + _LANE + 14 + 15 * number
        parts.append(
            f'<rect x="{_LEFT}" y="{below - 9}" width="10" height="10" '
            f'fill="{_COLOURS[number % len(_COLOURS)]}"/>'
        )
        parts.append(
            _text(
                _LEFT + 16,
                below,
                f"{called[unit.job, unit.pool]}: {unit.duty:.0%} of a cycle of {unit.period:.4g} s",
            )
        )
    parts.append(_text(_WIDTH - 20, y + _LANE + 14, f"{end - begin:.4g} s", anchor="end"))
    return "".join(parts)


def _text(x: int, y: int, words: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
