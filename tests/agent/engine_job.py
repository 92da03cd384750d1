"""A job that is an inference server: starts a fake engine below itself and registers its address.

Prints ``{"event": "registered", "url": …}`` or ``{"event": "refused", "message": …}``; ends with its stdin.
"""

import argparse
import json
import os
import sys

from coslice.testing.engines import FakeEngine
from coslice.workload import register

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="vllm")
parser.add_argument("--url", default="", help="register this instead")
options, flags = parser.parse_known_args()
with FakeEngine(options.kind, *flags, weights=24 << 20, kv=8 << 20) as engine:
    handle = register(endpoint=options.url or engine.url, env=os.environ)
    said = {"event": "refused", "message": str(handle.error)}
    if handle.error is None:
        said = {"event": "registered", "url": engine.url, "engine": str(engine.pid)}
    print(json.dumps(said), flush=True)
    sys.stdin.read()
