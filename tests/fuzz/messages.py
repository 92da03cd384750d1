"""Messages as nobody should send them: built from the wire's own descriptors, with ids that exist and others.

``HOSTILE`` ids and numbers are the limits of their types, and what looks like something else where it is used
(a path, an operation's name).
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

IDS = ("pool", "victim", "stranger", "n1", "other", "pool/1/n1", "victim/run/1/2")
HOSTILE = (
    "",
    " ",
    "x" * 63,
    "x" * 64,
    "x" * 5000,
    "../../etc/passwd",
    "a/b",
    "\x00",
    "\n",
    "é",
    "💥" * 40,
    "%s{}",
)
_F = FieldDescriptor
_INT64 = {_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64}
_INT32 = {_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32}


def integers(bits: int) -> st.SearchStrategy[int]:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return st.sampled_from([0, 1, -1, 2, low, high, high - 1, 1 << 30]) | st.integers(low, high)


def texts(ids: Sequence[str]) -> st.SearchStrategy[str]:
    arbitrary = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return st.sampled_from([*IDS, *ids, *HOSTILE]) | arbitrary


@st.composite
def messages(draw: Any, descriptor: Descriptor, *, ids: Sequence[str] = (), depth: int = 3) -> Any:
    """Any message of this type. ``ids``: further strings that exist on the server."""
    message = GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if depth or field.message_type is None]
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.name, max_size=6)):
        _set(draw, message, field, ids, depth)
    return message


def _set(draw: Any, message: Message, field: FieldDescriptor, ids: Sequence[str], depth: int) -> None:
    values = draw(st.lists(_values(field, ids, depth), min_size=1, max_size=3 if field.is_repeated else 1))
    if field.is_repeated:
        getattr(message, field.name).extend(values)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(values[0])
    else:
        setattr(message, field.name, values[0])


def _values(field: FieldDescriptor, ids: Sequence[str], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, ids=ids, depth=depth - 1)
    if field.type == _F.TYPE_STRING:
        return texts(ids)
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=50)
    if field.type == _F.TYPE_BOOL:
        return st.booleans()
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return st.floats(width=64 if field.type == _F.TYPE_DOUBLE else 32)
    if field.type in _INT64:
        return integers(64)
    if field.type in _INT32 or field.type == _F.TYPE_ENUM:
        return integers(32)
    raise AssertionError(f"the wire has a field of a new type: {field.full_name}")


def payloads(descriptor: Descriptor, *, ids: Sequence[str] = ()) -> st.SearchStrategy[bytes]:
    """Bytes that claim to be such a message: mostly they are, sometimes cut short, sometimes anything."""
    whole = messages(descriptor, ids=ids).map(lambda message: message.SerializeToString())
    cut = st.tuples(whole, st.integers(0, 40)).map(lambda pair: pair[0][: -pair[1] or None])
    return whole | whole | whole | cut | st.binary(max_size=200)
