"""What the demo's jobs are asked to do, and how an answer is checked.

Strings of digits in, strings of digits out, with partial credit for each right position. The verifier process
imports this module and nothing heavier; the jobs see only the rewards.
"""

from collections.abc import Callable, Sequence
from typing import Final

DIGITS: Final = 10
SEPARATOR: Final = DIGITS
"""The token between question and answer; the vocabulary is the ten digits and this one."""
VOCABULARY: Final = DIGITS + 1
LENGTH: Final = 4
"""Digits of a question, and of its answer."""


def _shifted(question: str) -> str:
    return "".join(str((int(digit) + 3) % DIGITS) for digit in question)


TASKS: Final[dict[str, Callable[[str], str]]] = {
    "reverse": lambda question: question[::-1],
    "sort": lambda question: "".join(sorted(question)),
    "shift": _shifted,
}


def score(task: str, question: str, answer: str) -> float:
    """The share of positions that are right, in [0, 1]. ``KeyError``: there is no such task."""
    right = TASKS[task](question)
    return sum(ours == theirs for ours, theirs in zip(right, answer, strict=False)) / len(right)


def to_text(tokens: Sequence[int]) -> str:
    return "".join(map(str, tokens))
