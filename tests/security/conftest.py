"""The fixtures of the orchestrator's and the agent's tests."""

from agent.conftest import node
from orchestrator.conftest import world

__all__ = ["node", "world"]
