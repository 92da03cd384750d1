"""One machine's place in a store: its key, its codec and the version seen last. A driver's ``save`` is
``Slot.save``."""

from typing import Generic, TypeVar

from coslice.errors import ConfigError
from coslice.store.base import Store
from coslice.store.codec import Codec

S = TypeVar("S")


class Slot(Generic[S]):
    """``found`` is the key's entry in ``Store.load()``, or None for a new key. One writer: its driver."""

    def __init__(
        self, store: Store, key: str, codec: Codec[S], found: tuple[bytes, int] | None = None
    ) -> None:
        self._store, self._key, self._codec = store, key, codec
        self._data, self._version = found if found is not None else (b"", 0)

    def state(self) -> S | None:
        """What was found, decoded; None for a new key. Raises ``ConfigError`` as the codec does, naming the
        key."""
        try:
            return self._codec.decode(self._data) if self._version else None
        except ConfigError as error:
            raise ConfigError(f"{self._key} in the store: {error}", data=error.data) from None

    async def save(self, state: S) -> None:
        data = self._codec.encode(state)
        if data == self._data:  # only what is not written differs
            return
        self._version = await self._store.save(self._key, data, expect=self._version)
        self._data = data

    async def delete(self) -> None:
        await self._store.delete(self._key, expect=self._version)
        self._data, self._version = b"", 0
