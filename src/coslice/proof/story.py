"""What happened in a world, kept cheaply: written out only when somebody must read it.

One line a decision: when, who heard what, what it did about it, and why, in the machine's own words.
"""

from collections import Counter, deque
from collections.abc import Iterator

from msgspec.structs import asdict

from coslice.core.effects import Effect, Reason
from coslice.core.events import Event, NodeFacts

Line = tuple[float, str, Event | str, tuple[Effect, ...], tuple[Reason, ...]]


class Story:
    """``events`` counts what the machines heard, ``faults`` how often each kind of trouble struck."""

    def __init__(self, *, kept: int = 40) -> None:
        self._lines: deque[Line] = deque(maxlen=kept)
        self.events = 0
        self.faults: Counter[str] = Counter()

    def heard(
        self, at: float, who: str, event: Event, effects: tuple[Effect, ...], reasons: tuple[Reason, ...]
    ) -> None:
        self.events += 1
        self._lines.append((at, who, event, effects, reasons))

    def fault(self, at: float, kind: str, text: str) -> None:
        self.faults[kind] += 1
        self._lines.append((at, "fault", f"{kind}: {text}", (), ()))

    def tell(self) -> Iterator[str]:
        for at, who, event, effects, reasons in self._lines:
            yield f"{at:9.2f}  {who:<10} {event if isinstance(event, str) else _brief(event)}"
            for reason in reasons:
                yield f"{'':21} why: {reason.text} [{reason.code}]"
            for effect in effects:
                yield f"{'':21}  ->  {_brief(effect)}"


class Silence(Story):
    """For exploration: nothing is kept, paths are walked again instead."""

    def heard(
        self, at: float, who: str, event: Event, effects: tuple[Effect, ...], reasons: tuple[Reason, ...]
    ) -> None:
        pass

    def fault(self, at: float, kind: str, text: str) -> None:
        pass


def _brief(thing: Event | Effect) -> str:
    fields = {k: v for k, v in asdict(thing).items() if k not in ("at", "reason") and v not in ("", 0, None)}
    parts = (f"{key}={_facts(v) if isinstance(v, NodeFacts) else v}" for key, v in fields.items())
    return f"{type(thing).__name__}({', '.join(parts)})"


def _facts(facts: NodeFacts) -> str:
    there = " ".join(f"{c.job}:{c.state}" for c in facts.contexts)
    return f"[v{facts.version} {there or 'nobody'}]"
