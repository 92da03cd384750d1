"""The store contract on a Kubernetes API with behaviour: as the store of whoever was elected, and without."""

from collections.abc import Iterator

import pytest
from store.elected import Elected

from coslice.store import Store
from coslice.store.kube_api import KubeApi
from coslice.store.kube_location import parse_kubernetes
from coslice.store.kubernetes import KubernetesStore
from coslice.testing.fake_kubernetes_http import FakeKubernetes
from coslice.testing.store_contract import StoreContract


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as api:
        yield api


class TestKubernetesStore(StoreContract):
    durable = True

    @pytest.fixture
    def location(self, kubernetes: FakeKubernetes) -> str:
        return f"kubernetes://here/state?api={kubernetes.url}"

    def make(self, location: str) -> Store:
        return KubernetesStore(KubeApi(parse_kubernetes(location)))


class TestElectedKubernetesStore(StoreContract):
    durable = True
    writes_on_opening = True

    @pytest.fixture
    def location(self, kubernetes: FakeKubernetes) -> str:
        return f"kubernetes://here/state?api={kubernetes.url}"

    def make(self, location: str) -> Store:
        return Elected(location)
