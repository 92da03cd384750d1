"""Asking a store again that did not answer: at what pace, and for how long."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from coslice.store.base import NoAnswer
from coslice.store.election import Tenure

T = TypeVar("T")


def pauses() -> Iterator[float]:
    """Growing ones, without an end: neither kind of store tells when it is back."""
    pause = 0.02
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, 0.5)


def while_of_use(tenure: Tenure | None, patience: float) -> AbstractAsyncContextManager[object]:
    """Ends what is within, also a call that is under way, once the tenure is over (``Deposed``) or, without
    one, after ``patience`` seconds (``TimeoutError``)."""
    return tenure.lasting() if tenure is not None else asyncio.timeout(patience)


async def answered(ask: Callable[[], Awaitable[T]], tenure: Tenure | None, patience: float) -> T:
    """The first answer to what only reads. Raises ``Deposed`` or, with the last reason, ``NoAnswer``."""
    why = "it is silent"
    try:
        async with while_of_use(tenure, patience):
            for pause in pauses():
                try:
                    return await ask()
                except NoAnswer as error:
                    why = str(error)
                    await asyncio.sleep(pause)
    except TimeoutError:
        raise NoAnswer(why) from None
    raise AssertionError("the pauses do not end")
