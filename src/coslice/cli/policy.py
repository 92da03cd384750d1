"""``coslice policy``: who goes next in a group, shown and changed while it runs."""

from rich.console import Console

from coslice.cli.rpc import TIMEOUT, orchestrator
from coslice.core.policy import NAMES, policy_named
from coslice.errors import ConfigError, UnknownGroup
from coslice.wire.v1 import coslice_pb2 as pb

console = Console(highlight=False, emoji=False)


def set_policy(group: str, policy: str, *, address: str) -> None:
    """``policy`` empty: the configured one again."""
    if policy:
        try:
            policy_named(policy)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    with orchestrator(address) as stub:
        answer = stub.SetPolicy(pb.SetPolicyRequest(group=group, policy=policy), timeout=TIMEOUT)
    console.print(f"{group}: {answer.policy} from now on", markup=False)


def show_policies(group: str, *, address: str) -> None:
    with orchestrator(address) as stub:
        answer = stub.GetStatus(pb.GetStatusRequest(group=group), timeout=TIMEOUT)
    if not answer.groups:
        raise UnknownGroup("there is no group yet: start an agent that offers one (coslice up)")
    for status in answer.groups:
        console.print(f"{status.group}: {status.policy}", markup=False)
    console.print(f"known: {', '.join(NAMES)} (docs/policies.md)", markup=False, style="dim")
