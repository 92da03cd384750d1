"""The chart, rendered by the real helm: its objects, and what the processes are started with."""

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "coslice"
RELEASE, NAMESPACE = "rl", "gpus"
Json = dict[str, Any]


class Refused(Exception):
    """What helm says against these values."""


def helm() -> str:
    here = ROOT / "build" / "helm" / "helm"
    found = os.environ.get("HELM") or shutil.which("helm") or (str(here) if here.exists() else "")
    if not found:
        pytest.skip("there is no helm: make test-helm fetches one")
    return found


def run(*command: str, **values: Any) -> str:
    """helm with these values, in the dotted names of values.yaml; raises ``Refused``."""
    done = subprocess.run(
        (helm(), *command, "--values", "-"),
        input=json.dumps(nested(values)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def nested(values: Mapping[str, Any]) -> Json:
    tree: Json = {}
    for name, value in values.items():
        *path, last = name.split(".")
        at = tree
        for step in path:
            at = at.setdefault(step, {})
        at[last] = value
    return tree


class Rendered:
    def __init__(self, text: str) -> None:
        self.objects: list[Json] = [each for each in yaml.safe_load_all(text) if each]

    def of(self, kind: str, end: str = "") -> Json:
        """The only one of the kind whose name ends so; empty if there is none."""
        found = [o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].endswith(end)]
        assert len(found) < 2, [o["metadata"]["name"] for o in found]
        return found[0] if found else {}

    def workload(self, part: str) -> Json:
        return self.of("StatefulSet" if part == "orchestrator" else "DaemonSet")

    def pod(self, part: str) -> Json:
        return self.workload(part).get("spec", {}).get("template", {}).get("spec", {})

    def container(self, part: str) -> Json:
        return next(iter(self.pod(part).get("containers", ())), {})

    def args(self, part: str) -> list[str]:
        """As the kubelet hands them over, on the node ``node-1``."""
        env = {"NODE_NAME": "node-1", "POD_NAME": f"{RELEASE}-coslice-orchestrator-0"}
        return [
            re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], arg)
            for arg in self.container(part).get("args", ())
        ]


@functools.lru_cache(maxsize=1)
def default() -> Rendered:
    return render()


def render(**values: Any) -> Rendered:
    return Rendered(run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, **values))


def leaves(values: Json, prefix: str = "") -> list[str]:
    """Dotted names of all values; a map or list that is empty, or holds what users name, is one value."""
    found = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in FREE:
            found += leaves(value, f"{path}.")
        else:
            found.append(path)
    return found


FREE = {"orchestrator.resources", "agent.resources", "agent.nodeSelector"}
