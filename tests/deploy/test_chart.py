"""Over a matrix of values: valid for every Kubernetes from 1.34 on, as few rights as said, and the commands
are ones that coslice takes."""

import base64
import itertools
import re
from typing import Any

import pytest
import typer.main
from deploy.chart import CHART, Rendered, default, render, run
from deploy.test_values import ETCD, GIVEN, MONITOR, SQLITE

from coslice.agent.config import AgentConfig
from coslice.agent.topology.place import KUBERNETES
from coslice.cli.main import app
from coslice.cli.settings import applied, parse_settings
from coslice.orchestrator.config import OrchestratorConfig
from coslice.security.listening import make_tls
from coslice.security.tokens import read_keys
from coslice.store import check_location

kubernetes_validate = pytest.importorskip("kubernetes_validate")

pytestmark = pytest.mark.helm

VERSIONS = ("1.34", "1.35", "1.36", "1.37")
LONG = "n" * 51 + "." + "example." * 20 + "x"
"""A node's; cut after 52 characters it ends in a dot."""
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
CRDS = {"Certificate", "Issuer", "ServiceMonitor", "PodMonitor"}
STORES: list[dict[str, Any]] = [{}, ETCD, SQLITE]
SECURITY: list[dict[str, Any]] = [
    {},
    {"tls.certManager.issuer.name": "corp", "tls.perNode": True, "tls.nodes": ["node-1"]},
    GIVEN,
    {"insecure": True},
]
NODES: list[dict[str, Any]] = [
    {},
    {"agent.gpu": False, "agent.backend": "app_channel", "agent.groups": ["t:memory=8GiB"]},
    {"agent.enabled": False},
]
SIGHT: list[dict[str, Any]] = [
    {"networkPolicy.enabled": False, "orchestrator.podDisruptionBudget.enabled": False},
    {**MONITOR, "tracing.otlp": "http://otel:4317", "dra.claims": [{"name": "train", "count": 8}]},
]
MATRIX = [
    {**store, **security, **nodes, **sight}
    for store, security, nodes, sight in itertools.product(STORES, SECURITY, NODES, SIGHT)
]


@pytest.mark.parametrize("number", range(len(MATRIX)))
def test_the_objects_are_valid_and_the_commands_are_taken(number: int) -> None:
    rendered = render(**MATRIX[number])
    for thing in rendered.objects:
        if thing["kind"] in CRDS:
            continue  # of cert-manager and the Prometheus operator: no schema here
        for version in VERSIONS:
            kubernetes_validate.validate(thing, version, strict=True)
    names = [(o["kind"], o["metadata"]["name"]) for o in rendered.objects]
    assert len(set(names)) == len(names)
    _check_commands(rendered)
    _check_mounts(rendered)


@pytest.mark.parametrize("values", [{}, {**ETCD, **GIVEN, **MONITOR}, {**SQLITE, "insecure": True}])
def test_lint(values: dict[str, Any]) -> None:
    assert "0 chart(s) failed" in run("lint", str(CHART), "--strict", **values)


def _check_commands(rendered: Rendered) -> None:
    for part, kind in (("orchestrator", OrchestratorConfig), ("agent", AgentConfig)):
        args = rendered.args(part)
        if not args:
            continue
        group = typer.main.get_command(app)
        command = group.commands[args[0]]  # type: ignore[attr-defined]
        given = command.make_context(args[0], args[1:]).params
        parse_settings(given["set_"] or (), kind)
        tls = make_tls(given["tls_cert"], given["tls_key"], given["tls_ca"])
        assert (tls is None) == given["insecure"] == (given["token_secret"] is None)
        if part == "orchestrator":
            check_location(given["store"], insecure=given["insecure"])
        else:
            assert (given["topology"], given["node"]) == (KUBERNETES, "node-1")


def _check_mounts(rendered: Rendered) -> None:
    """Every file that a command names is in a volume, and every volume is mounted."""
    for part in ("orchestrator", "agent"):
        mounted = {
            mount["mountPath"]: mount["name"] for mount in rendered.container(part).get("volumeMounts", ())
        }
        claims = rendered.workload(part).get("spec", {}).get("volumeClaimTemplates", ())
        volumes = {v["name"] for v in rendered.pod(part).get("volumes", ())}
        assert {*volumes, *(claim["metadata"]["name"] for claim in claims)} == set(mounted.values())
        for arg in rendered.args(part):
            for path in (word for word in arg.replace("&", "=").split("=") if word.startswith("/")):
                assert any(path.startswith(mount) for mount in mounted), arg


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["certManager", "secret"])
def test_each_node_has_the_key_of_its_own_name_only(given: dict[str, Any]) -> None:
    nodes = ["node-1", "gpu.example", f"{LONG}-1", f"{LONG}-2", "n" * 63, "n" * 64]
    nodes += [] if given else [("n" * 63 + ".") * 3 + "n" * 61]
    rendered = render(**given, **MONITOR, **{"tls.perNode": True, "tls.nodes": nodes})
    for thing in rendered.objects:
        if thing["kind"] not in CRDS:
            kubernetes_validate.validate(thing, VERSIONS[0], strict=True)
    agents = [thing for thing in rendered.objects if thing["kind"] == "DaemonSet"]
    made = {
        thing["spec"]["secretName"]: thing["spec"].get("dnsNames")
        for thing in rendered.objects
        if thing["kind"] == "Certificate"
    }
    mounted = set()
    selectors = [agent["spec"]["selector"]["matchLabels"] for agent in agents]
    for node, agent, selector in zip(nodes, agents, selectors, strict=True):
        template = agent["spec"]["template"]
        where = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert where["nodeSelectorTerms"] == [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        ]
        (mine,) = (v["secret"]["secretName"] for v in template["spec"]["volumes"] if v["name"] == "tls")
        mounted.add(mine)
        if given:
            assert mine == f"a-tls-{node}"
        else:
            assert made[mine] == [node, "localhost"]
        selected = [
            other["metadata"]["name"]
            for other in agents
            if selector.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert selected == [agent["metadata"]["name"]], "another's pods are not its own"
        assert agent["metadata"]["name"].endswith(
            f"-agent-{node}" if len(node) < 64 else selector["coslice/node"]
        )
        for label, value in template["metadata"]["labels"].items():
            assert LABEL.fullmatch(value), label
    names = [thing["metadata"]["name"] for thing in rendered.objects]
    for name in (*names, *mounted):
        assert SUBDOMAIN.fullmatch(name), name
        assert len(name) <= 253, name
    assert len({agent["metadata"]["name"] for agent in agents}) == len(mounted) == len(nodes)
    (monitored,) = rendered.of("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert monitored["tlsConfig"]["ca"]["secret"]["name"].endswith(("agent-node-1-tls", "a-tls-node-1"))


@pytest.mark.parametrize("release", ["1e5", "0.rl", "a" * 53, "n" * 29 + "-b.c"])
def test_any_name_of_a_release_and_of_its_namespace_makes_objects_that_are_valid(release: str) -> None:
    rendered = Rendered(run("template", release, str(CHART), "--namespace", "42", **MONITOR))
    for thing in rendered.objects:
        if thing["kind"] not in CRDS:
            kubernetes_validate.validate(thing, VERSIONS[0], strict=True)
        if thing["kind"] == "Service":
            assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", thing["metadata"]["name"])
    assert (
        rendered.workload("agent")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == release
    )
    assert all(len(thing["metadata"]["name"]) <= 63 for thing in rendered.objects)
    _check_commands(rendered)


def test_large_and_small_numbers_of_a_file_are_what_was_written() -> None:
    """As YAML and JSON have them; Helm would print them as 1e+08."""
    rendered = render(
        **{
            "agent.runAsUser": 1000650000,
            "orchestrator.settings": {
                "journal_max_bytes": 100000000,
                "confirm_timeout": 0.00005,
                "max_hold": "2h",
            },
            "orchestrator.leaderTtl": 1500000,
            "dra.claims": [{"name": "x", "count": 1000000}],
        }
    )
    kubernetes_validate.validate(rendered.workload("agent"), VERSIONS[0], strict=True)
    kubernetes_validate.validate(rendered.of("ResourceClaim"), VERSIONS[0], strict=True)
    settings = parse_settings(
        [arg.removeprefix("--set=") for arg in rendered.args("orchestrator") if arg.startswith("--set=")],
        OrchestratorConfig,
    )
    config = applied(OrchestratorConfig(), settings)
    assert (config.journal_max_bytes, config.confirm_timeout, config.max_hold) == (10**8, 0.00005, 7200.0)
    assert "--leader-ttl=1500000" in rendered.args("orchestrator")


@pytest.mark.parametrize(
    ("image", "pulled"),
    [
        ("r.example:5000/coslice", "r.example:5000/coslice:v9"),
        ("r.example:5000/coslice:v1", "r.example:5000/coslice:v1"),
        ("r/coslice@sha256:" + "a" * 64, "r/coslice@sha256:" + "a" * 64),
    ],
)
def test_an_image_may_say_its_own_tag_or_digest(image: str, pulled: str) -> None:
    rendered = render(**{"image.agent": image, "image.orchestrator": image, "image.tag": "v9"})
    assert {rendered.container(part)["image"] for part in ("agent", "orchestrator")} == {pulled}


def test_those_that_stand_by_may_watch_the_leader() -> None:
    """At the address that it advertises, from their own pods."""
    (port,) = {arg.rpartition(":")[2] for arg in default().args("orchestrator") if "--advertise=" in arg}
    (name,) = {
        p["name"] for p in default().container("orchestrator")["ports"] if p["containerPort"] == int(port)
    }
    labels = default().workload("orchestrator")["spec"]["selector"]["matchLabels"]
    rules = default().of("NetworkPolicy", "-orchestrator")["spec"]["ingress"]
    assert any(
        {"podSelector": {"matchLabels": labels}} in rule["from"]
        and {"port": name, "protocol": "TCP"} in rule["ports"]
        for rule in rules
    )


def test_nobody_is_privileged() -> None:
    for part in ("orchestrator", "agent"):
        context = default().container(part)["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not context.get("privileged")
        assert not default().pod(part).get("hostNetwork")
        assert not default().pod(part).get("hostIPC")
    assert "add" not in default().container("orchestrator")["securityContext"]["capabilities"]
    assert default().container("agent")["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE", "KILL"]
    assert default().pod("orchestrator")["securityContext"]["runAsNonRoot"] is True
    assert [v["name"] for v in default().pod("agent")["volumes"] if "hostPath" in v] == ["state"]


def test_each_may_ask_the_api_for_what_it_needs_only() -> None:
    role, cluster = default().of("Role"), default().of("ClusterRole")
    assert {r for rule in role["rules"] for r in rule["resources"]} == {"configmaps", "leases"}
    assert [(rule["resources"], rule["verbs"]) for rule in cluster["rules"]] == [
        (["nodes", "pods"], ["get", "list", "watch"])
    ]
    assert default().pod("orchestrator")["automountServiceAccountToken"] is True
    assert render(**SQLITE).pod("orchestrator")["automountServiceAccountToken"] is False


def test_the_secret_it_makes_is_a_token_secret(tmp_path) -> None:
    made = default().of("Secret")["data"]["token.secret"]
    file = tmp_path / "token.secret"
    file.write_bytes(base64.b64decode(made))
    file.chmod(0o600)
    assert len(read_keys(file)) == 1
    assert render().of("Secret")["data"]["token.secret"] != made


def test_a_leader_s_address_is_in_its_certificate() -> None:
    (told,) = (a for a in default().args("orchestrator") if a.startswith("--advertise="))
    host = told.removeprefix("--advertise=").partition(":")[0]
    names = default().of("Certificate", "-orchestrator")["spec"]["dnsNames"]
    assert f"*.{host.partition('.')[2]}" in names
    assert default().workload("orchestrator")["spec"]["serviceName"] == host.split(".")[1]
    (dialled,) = (a for a in default().args("agent") if a.startswith("--orchestrator="))
    assert dialled.removeprefix("--orchestrator=").partition(":")[0] in names
