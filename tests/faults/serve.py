"""An orchestrator or an agent with settings that the command line does not offer (short times).

``serve.py orchestrator|agent JSON``: announces itself as ``coslice orchestrator --json`` does.
"""

import asyncio
import json
import sys

import msgspec

from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig


async def main(kind: str, settings: str) -> None:
    if kind == "orchestrator":
        app = OrchestratorApp(msgspec.json.decode(settings, type=OrchestratorConfig))
        await app.start()
        print(json.dumps({"ready": True, "orchestrator": app.address}), flush=True)
    else:
        agent = AgentApp(msgspec.json.decode(settings, type=AgentConfig))
        await agent.start()
        print(json.dumps({"ready": True, "agent": agent.address}), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
