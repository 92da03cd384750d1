"""The outcome of one event, for either machine."""

from typing import Generic, TypeVar

from msgspec import Struct

from coslice.core.effects import Reason

S = TypeVar("S")
F = TypeVar("F")


class Step(Struct, Generic[S, F], frozen=True, gc=False):
    """Persist ``state`` first, then carry out ``effects`` in order; ``reasons`` go to the journal."""

    state: S
    effects: tuple[F, ...] = ()
    reasons: tuple[Reason, ...] = ()


class Rejected(Exception):
    """The event is not allowed; nothing changed. ``code`` is a ``RefuseCode``, ``data`` names figures."""

    def __init__(self, code: str, message: str, **data: str) -> None:
        super().__init__(message)
        self.code, self.data = code, data
