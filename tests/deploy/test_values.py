# ruff: noqa: E501  # a table: one line, one value
"""Every value changes the rendered objects as docs/kubernetes.md says, and nothing but values is taken."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, ROOT, Refused, Rendered, default, leaves, render

pytestmark = pytest.mark.helm

Seen = Callable[[Rendered], bool]


def arg(part: str, *words: str) -> Seen:
    return lambda r: all(word in r.args(part) for word in words)


def pod(part: str, **fields: Any) -> Seen:
    return lambda r: all(r.pod(part).get(name) == value for name, value in fields.items())


def container(part: str, **fields: Any) -> Seen:
    return lambda r: all(r.container(part).get(name) == value for name, value in fields.items())


def volume(part: str, name: str, **fields: Any) -> Seen:
    return lambda r: {"name": name, **fields} in r.pod(part).get("volumes", ())


def secret(name: str) -> dict[str, Any]:
    return {"secretName": name, "defaultMode": 0o440}


def annotated(part: str, name: str, value: str) -> Seen:
    template = "template"
    return lambda r: r.workload(part)["spec"][template]["metadata"].get("annotations", {}).get(name) == value


def spec(kind: str, end: str, **fields: Any) -> Seen:
    return lambda r: all(r.of(kind, end).get("spec", {}).get(n) == v for n, v in fields.items())


GIVEN = {"tls.source": "secret", "tls.orchestratorSecret": "o-tls", "tls.agentSecret": "a-tls"}
ETCD = {
    "orchestrator.store.type": "etcd",
    "orchestrator.store.etcd.endpoints": ["e0:2379", "e1:2379"],
    "orchestrator.store.etcd.tlsSecret": "etcd-tls",
}
SQLITE = {"orchestrator.store.type": "sqlite", "orchestrator.replicas": 1}
MONITOR = {
    "metrics.serviceMonitor.enabled": True,
    "metrics.serviceMonitor.tokenSecret.name": "read",
}
FILES = "?ca=/etc/coslice/etcd/ca.crt&cert=/etc/coslice/etcd/tls.crt&key=/etc/coslice/etcd/tls.key"
AFFINITY = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
PEER = [{"podSelector": {"matchLabels": {"app": "x"}}}]


def _of_both(part: str) -> list[tuple[str, Any, Seen]]:
    return [
        (f"{part}.settings", {"retries": 7} if part == "agent" else {"max_hold": "30m"},
         arg(part, "--set=retries=7" if part == "agent" else "--set=max_hold=30m")),
        (f"{part}.logLevel", "debug", arg(part, "--log-level=debug")),
        (f"{part}.logFormat", "text", arg(part, "--log-format=text")),
        (f"{part}.extraArgs", ["--set=hello_timeout=3"], arg(part, "--set=hello_timeout=3")),
        (f"{part}.resources", {"limits": {"cpu": 2}}, lambda r: (
            r.container(part)["resources"].get("limits", {}).get("cpu") == 2)),
        (f"{part}.nodeSelector", {"pool": "x"}, lambda r: r.pod(part).get("nodeSelector", {}).get("pool") == "x"),
        (f"{part}.tolerations", [{"operator": "Exists"}], pod(part, tolerations=[{"operator": "Exists"}])),
        (f"{part}.affinity", AFFINITY, pod(part, affinity=AFFINITY)),
        (f"{part}.priorityClassName", "high", pod(part, priorityClassName="high")),
        (f"{part}.podAnnotations", {"a": "b"}, annotated(part, "a", "b")),
    ]  # fmt: skip


TABLE: list[tuple[Any, ...]] = [
    ("image.orchestrator", "r/o", container("orchestrator", image="r/o:0.1.0")),
    ("image.agent", "r/a", container("agent", image="r/a:0.1.0")),
    ("image.tag", "v9", lambda r: all(r.container(p)["image"].endswith(":v9") for p in ("orchestrator", "agent"))),
    ("image.pullPolicy", "Always", container("agent", imagePullPolicy="Always")),
    ("image.pullSecrets", ["reg"], pod("orchestrator", imagePullSecrets=[{"name": "reg"}])),
    ("insecure", True, lambda r: arg("agent", "--insecure")(r) and arg("orchestrator", "--insecure")(r)
        and not r.of("Secret") and not any(a.startswith("--tls") for a in r.args("agent"))),
    ("tls.source", "secret", lambda r: not r.of("Certificate", "-agent"), GIVEN),
    ("tls.certManager.issuer.name", "corp", lambda r: (
        r.of("Certificate", "-agent")["spec"]["issuerRef"]["name"] == "corp" and not r.of("Issuer", "-ca"))),
    ("tls.certManager.issuer.kind", "ClusterIssuer", lambda r: (
        r.of("Certificate", "-agent")["spec"]["issuerRef"]["kind"] == "ClusterIssuer"),
        {"tls.certManager.issuer.name": "corp"}),
    ("tls.certManager.duration", "48h", spec("Certificate", "-orchestrator", duration="48h")),
    ("tls.certManager.renewBefore", "12h", spec("Certificate", "-agent", renewBefore="12h")),
    ("tls.orchestratorSecret", "mine", volume("orchestrator", "tls", secret=secret("mine")), GIVEN),
    ("tls.agentSecret", "mine", lambda r: volume("agent", "tls", secret=secret("mine"))(r)
        and arg("agent", "--tls-cert=/etc/coslice/tls/node-1.pem")(r), GIVEN),
    ("tls.nodes", ["node-1"], lambda r: "node-1" in r.of("Certificate", "-agent")["spec"]["dnsNames"]),
    ("tls.perNode", True, lambda r: (
        r.of("Certificate", "-agent-node-1")["spec"]["dnsNames"] == ["node-1", "localhost"]
        and volume("agent", "tls", secret=secret("rl-coslice-agent-node-1-tls"))(r)), {"tls.nodes": ["node-1"]}),
    ("tokens.secret", "mine", lambda r: not r.of("Secret")
        and volume("agent", "tokens", secret=secret("mine"))(r)),
    ("clusterDomain", "corp.example", lambda r: (
        "rl-coslice.gpus.svc.corp.example" in r.of("Certificate", "-orchestrator")["spec"]["dnsNames"])),
    ("orchestrator.replicas", 3, spec("StatefulSet", "", replicas=3)),
    ("orchestrator.store.type", "sqlite", lambda r: bool(r.workload("orchestrator")["spec"].get("volumeClaimTemplates"))
        and arg("orchestrator", "--store=sqlite:/var/lib/coslice/state/orchestrator.db")(r) and not r.of("Role"),
        {"orchestrator.replicas": 1}),
    ("orchestrator.store.etcd.endpoints", ["x:1"], arg("orchestrator", f"--store=etcd+tls://x:1/gpus/rl-coslice{FILES}"), ETCD),
    ("orchestrator.store.etcd.prefix", "p", arg("orchestrator", f"--store=etcd+tls://e0:2379,e1:2379/p{FILES}"), ETCD),
    ("orchestrator.store.etcd.tlsSecret", "other", volume("orchestrator", "etcd", secret=secret("other")), ETCD),
    ("orchestrator.store.sqlite.size", "5Gi", lambda r: _claim(r)["resources"]["requests"]["storage"] == "5Gi", SQLITE),
    ("orchestrator.store.sqlite.storageClass", "fast", lambda r: _claim(r).get("storageClassName") == "fast", SQLITE),
    ("orchestrator.leaderTtl", 9, arg("orchestrator", "--leader-ttl=9")),
    ("orchestrator.policy", "fifo", arg("orchestrator", "--policy=fifo")),
    ("orchestrator.admission", "enforce", arg("orchestrator", "--admission=enforce")),
    ("orchestrator.maxSlowdown", 1.5, arg("orchestrator", "--max-slowdown=1.5")),
    ("orchestrator.service.type", "NodePort", spec("Service", "rl-coslice", type="NodePort")),
    ("orchestrator.service.annotations", {"a": "b"}, lambda r: (
        r.of("Service", "rl-coslice")["metadata"].get("annotations") == {"a": "b"})),
    ("orchestrator.podDisruptionBudget.enabled", False, lambda r: not r.of("PodDisruptionBudget")),
    ("orchestrator.podDisruptionBudget.maxUnavailable", "50%", spec("PodDisruptionBudget", "", maxUnavailable="50%")),
    *_of_both("orchestrator"),
    ("agent.enabled", False, lambda r: not r.of("DaemonSet") and not r.of("ClusterRole")),
    ("agent.gpu", False, lambda r: arg("agent", "--device=host")(r) and "runtimeClassName" not in r.pod("agent")
        and "NVIDIA_VISIBLE_DEVICES" not in str(r.container("agent")["env"])),
    ("agent.runtimeClassName", "nv", pod("agent", runtimeClassName="nv")),
    ("agent.groups", ["train:memory=8GiB"], arg("agent", "--group=train:memory=8GiB")),
    ("agent.backend", "app_channel", arg("agent", "--backend=app_channel")),
    ("agent.hostMemory", "64GiB", arg("agent", "--host-memory=64GiB")),
    ("agent.hostPerJob", "32GiB", arg("agent", "--host-per-job=32GiB")),
    ("agent.disk", "1TiB", arg("agent", "--disk=1TiB")),
    ("agent.stateDir", "/srv/x", lambda r: arg("agent", "--state=/srv/x")(r)
        and volume("agent", "state", hostPath={"path": "/srv/x", "type": "DirectoryOrCreate"})(r)),
    ("agent.runAsUser", 1000, lambda r: r.pod("agent")["securityContext"]["runAsUser"] == 1000),
    ("agent.maxUnavailable", "10%", lambda r: (
        r.workload("agent")["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "10%")),
    *_of_both("agent"),
    ("metrics.serviceMonitor.enabled", True, lambda r: bool(r.of("ServiceMonitor") and r.of("PodMonitor")),
        {"metrics.serviceMonitor.tokenSecret.name": "read"}),
    ("metrics.serviceMonitor.interval", "5s", lambda r: _scrape(r).get("interval") == "5s", MONITOR),
    ("metrics.serviceMonitor.labels", {"team": "x"}, lambda r: (
        r.of("PodMonitor")["metadata"]["labels"].get("team") == "x"), MONITOR),
    ("metrics.serviceMonitor.tokenSecret.name", "other", lambda r: (
        _scrape(r)["authorization"]["credentials"]["name"] == "other"), MONITOR),
    ("metrics.serviceMonitor.tokenSecret.key", "t", lambda r: (
        _scrape(r)["authorization"]["credentials"]["key"] == "t"), MONITOR),
    ("tracing.otlp", "http://otel:4317", lambda r: arg("agent", "--otlp=http://otel:4317")(r)
        and arg("orchestrator", "--otlp=http://otel:4317")(r)),
    ("networkPolicy.enabled", False, lambda r: not r.of("NetworkPolicy", "-agent")),
    ("networkPolicy.clients", PEER, lambda r: (
        r.of("NetworkPolicy", "-orchestrator")["spec"]["ingress"][0]["from"] == PEER)),
    ("networkPolicy.monitoring", PEER, lambda r: (
        r.of("NetworkPolicy", "-agent")["spec"]["ingress"][1]["from"] == PEER)),
    ("dra.claims", [{"name": "train", "namespace": "rl", "count": 4}], lambda r: (
        r.of("ResourceClaim").get("metadata", {}).get("namespace") == "rl"
        and r.of("ResourceClaim")["spec"]["devices"]["requests"][0]["exactly"]["count"] == 4)),
]  # fmt: skip


def _claim(r: Rendered) -> Any:
    return r.workload("orchestrator")["spec"]["volumeClaimTemplates"][0]["spec"]


def _scrape(r: Rendered) -> Any:
    return r.of("PodMonitor")["spec"]["podMetricsEndpoints"][0]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_a_value_changes_the_objects_as_documented(row: tuple[Any, ...]) -> None:
    name, value, seen, *rest = row
    beside = rest[0] if rest else {}
    before = {key: other for key, other in beside.items() if key != name}
    try:
        without = render(**before)
    except Refused:
        without = default()
    assert seen(render(**{**beside, name: value}))
    with suppress(KeyError, IndexError):  # what it would be seen in may not even be there
        assert not seen(without), "it is so without the value"


def test_every_value_is_in_the_table_and_in_the_documentation() -> None:
    values = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    assert sorted(values) == sorted(row[0] for row in TABLE)
    page = (ROOT / "docs" / "kubernetes.md").read_text().partition("\n## Values\n")[2]
    documented = re.findall(r"^\| `([\w.]+)`", page, flags=re.M)
    assert sorted(documented) == sorted(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"orchestrator.replica": 3}, "additional properties 'replica'"),
        ({"orchestrator.replicas": 0}, "replicas"),
        ({"orchestrator.store.type": "redis"}, "store"),
        ({"orchestrator.store.type": "sqlite"}, "set orchestrator.replicas to 1"),
        ({"orchestrator.store.type": "etcd"}, "store.etcd.endpoints"),
        ({"orchestrator.store.type": "etcd", "orchestrator.store.etcd.endpoints": ["e:1"]}, "in the clear"),
        ({"tls.source": "secret"}, "tls.orchestratorSecret"),
        ({"tls.source": "secret", "tls.orchestratorSecret": "x"}, "tls.agentSecret"),
        ({"metrics.serviceMonitor.enabled": True}, "coslice token create --role read"),
        ({"agent.extraArgs": ["rm -rf"]}, "extraArgs"),
        ({"tls.perNode": True}, "tls.nodes"),
        ({"tls.perNode": True, "tls.nodes": ["n"], "insecure": True}, "leave one out"),
        (
            {"tls.perNode": True, "tls.nodes": ["n"], "agent.affinity": AFFINITY},
            "leave agent.affinity.nodeAffinity out",
        ),
        ({"agent.groups": ["train:policy=fifo"]}, "/agent/groups"),
        ({"tls.nodes": ["n", "n"]}, "/tls/nodes"),
        ({"tls.nodes": ["n" * 254]}, "/tls/nodes"),
        ({**GIVEN, "tls.nodes": ["n" * 250]}, "too long for a secret"),
        ({**GIVEN, "tls.nodes": ["n" * 248], "tls.perNode": True}, "too long for a secret (a-tls-NODE"),
        ({"dra.claims": [{"name": "x"}]}, "count"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=re.escape(words)):
        render(**values)
