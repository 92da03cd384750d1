"""One seed: a storm over a world of its own, then calm, in which everybody must be served in time.

Called by ``coslice chaos`` and the tests. A seed's outcome depends on the seed alone.
"""

from msgspec import Struct

from coslice.proof.calm import Calm
from coslice.proof.device import Violation
from coslice.proof.storm import Storm
from coslice.proof.story import Story

EVENTS = 300
"""What the machines hear in a storm at least."""


class Outcome(Struct, frozen=True):
    seed: int
    events: int
    faults: dict[str, int]
    violation: str = ""
    story: tuple[str, ...] = ()


def run_seed(seed: int, *, kept: int = 40, tell: bool = False) -> Outcome:
    """``kept``: lines of the story; they come with the outcome if the seed fails, or ``tell`` says so."""
    story = Story(kept=kept)
    violation = ""
    try:
        storm = Storm(seed, story)
        for _ in range(50 * EVENTS):
            if story.events >= EVENTS:
                break
            storm.step()
        Calm(storm.world).serve_all()
    except Violation as broken:
        violation = str(broken)
    except Exception as error:
        violation = f"{type(error).__name__}: {error}"
    lines = tuple(story.tell()) if violation or tell else ()
    return Outcome(seed, story.events, dict(story.faults), violation, lines)
