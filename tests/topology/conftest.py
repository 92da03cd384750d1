"""A cluster's API for a test: nodes and pods come, change and go."""

import uuid
from collections.abc import Iterator

import pytest
from agent.conftest import node

from coslice.testing.fake_kubernetes import Cluster
from coslice.testing.fake_kubernetes_http import FakeKubernetes

__all__ = ["labels", "node"]

NODES, PODS = ("v1", "nodes", ""), ("v1", "pods", "rl")


class Labels:
    """``kubectl``, as far as topology goes."""

    def __init__(self, api: FakeKubernetes) -> None:
        self.api, self.cluster = api, api.cluster

    def node(self, name: str, *groups: str) -> None:
        self.cluster.create(NODES, {"metadata": {"name": name, "labels": _groups(groups)}})

    def label(self, node: str, *groups: str) -> None:
        thing = self.cluster.get(NODES, node)
        thing["metadata"]["labels"] = _groups(groups)
        self.cluster.replace(NODES, node, thing)

    def pod(self, name: str, *, job: str, node: str = "node-0", group: str = "train") -> str:
        """Its uid. No container runs yet."""
        labels = {"timeslice.io/job-id": job, "timeslice.io/group": group}
        thing = {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node}}
        return self.cluster.create(PODS, thing)["metadata"]["uid"]

    def runs(self, name: str) -> None:
        container = f"containerd://{uuid.uuid4().hex * 2}"
        status = {
            "phase": "Running",
            "containerStatuses": [{"containerID": container, "state": {"running": {}}}],
        }
        self.cluster.patch(PODS, name, {"status": status})

    def delete(self, name: str) -> None:
        self.cluster.delete(PODS, name)


def _groups(names: tuple[str, ...]) -> dict[str, str]:
    return {f"group.timeslice.io/{name}": "true" for name in names}


@pytest.fixture
def labels() -> Iterator[Labels]:
    with FakeKubernetes(Cluster()) as api:
        api.bookmark_s = 0.1
        yield Labels(api)
