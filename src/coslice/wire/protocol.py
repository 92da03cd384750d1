"""The version of the wire, which each side says in its first message.

Adding a field or an rpc changes nothing here: whoever does not know it ignores it. The number grows when an
older side would misunderstand what it is told; then a side that speaks another number is refused by name, and
nothing is guessed.
"""

PROTOCOL = 1

UPGRADE = "agents, orchestrator, clients (docs/operating.md)"


def problem(who: str, said: int) -> str:
    """Why we cannot speak with one who said this number; empty: we can. 0: it said none, as the first ones
    did."""
    theirs = said or 1
    if theirs == PROTOCOL:
        return ""
    older = who if theirs < PROTOCOL else "this orchestrator"
    return (
        f"{who} speaks version {theirs} of coslice's wire and this orchestrator version {PROTOCOL}: "
        f"upgrade {older}; the order is: {UPGRADE}"
    )
