"""Names of things. Every identifier has its own type, so two kinds cannot be swapped by mistake."""

import re
from typing import NewType

GroupId = NewType("GroupId", str)
JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
OpId = NewType("OpId", str)
"""``group/epoch/node``: derived from state, so that a restart names the same operation again."""
SessionId = NewType("SessionId", str)
Incarnation = NewType("Incarnation", str)
"""Token of one start of a job, shared by all its processes."""
MemberId = NewType("MemberId", str)
"""``job/incarnation/pid/start_time``: one process of one incarnation."""
Epoch = NewType("Epoch", int)
"""Fencing token of a lease; strictly increasing within a group."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LENGTH, _OF_NODES = 63, 253


def check_name(kind: str, text: str) -> str:
    """Return ``text`` if it is a well-formed name of a job, group or node; raise ``ValueError`` otherwise.

    One grammar for all names, checked at the edge: 1 to 63 letters, digits, ``.``, ``_`` or ``-``, beginning
    and ending with a letter or digit. It is also valid as a Kubernetes label value. Only a node's may be as
    long as it is there: 253.
    """
    length = _OF_NODES if kind == "node" else _LENGTH
    if len(text) > length or _NAME.fullmatch(text) is None:
        shown = text if len(text) <= 80 else text[:77] + "…"
        raise ValueError(
            f"{shown!r} is not a {kind} name: use 1 to {length} letters, digits, '.', '_' or '-', "
            "beginning and ending with a letter or digit"
        )
    return text


def op_id(group: GroupId, epoch: Epoch, node: NodeId) -> OpId:
    return OpId(f"{group}/{epoch}/{node}")
