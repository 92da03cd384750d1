"""Dashboard, rules and runbooks speak of metrics that exist, with labels and values that exist."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from observe.catalog import ALL, series

from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.events import ContextState
from coslice.observe.metric import Metric
from coslice.orchestrator.metrics import FAULTY, STATES

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "coslice.rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "coslice.json"
RUNBOOKS = ROOT / "docs" / "operating.md"
OF_PROMETHEUS = {"instance", "job", "namespace", "le"}
"""Labels that Prometheus adds, and that of buckets."""
VALUES = {
    ("coslice_group_state", "state"): set(STATES),
    ("coslice_group_nodes", "state"): {"attached", "away", "hung", "drained"},
    ("coslice_sessions", "state"): {"connected", "lost"},
    ("coslice_agent_contexts", "state"): {state.value for state in ContextState},
    ("coslice_agent_host_bytes", "kind"): {"budget", "used", "held"},
    ("coslice_agent_disk_bytes", "kind"): {"budget", "used"},
    ("coslice_agent_device_bytes", "kind"): {"budget", "used", "peak"},
    ("coslice_faults_total", "reason"): {code.value for code in FAULTY},
    ("coslice_decisions_total", "reason"): {code.value for code in ReasonCode},
    ("coslice_refusals_total", "code"): {code.value for code in RefuseCode},
    ("coslice_agent_operations_total", "outcome"): {"done", "failed"},
}
_SELECTOR = re.compile(r"\b(coslice_\w+)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def problems(expr: str) -> list[str]:
    """What in this PromQL does not exist."""
    found, known = [], set(OF_PROMETHEUS)
    for name, matchers in _SELECTOR.findall(expr):
        metric = series(name)
        if metric is None:
            found.append(f"no metric {name}")
            continue
        known |= set(metric.labels)
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in {*metric.labels, *OF_PROMETHEUS}:
                found.append(f"{name} has no label {label}")
            elif "$" not in value:
                found += unknown_values(metric, label, operator, value)
    for names in _LABELS.findall(expr):
        for label in filter(None, (each.strip() for each in names.split(","))):
            if label not in known:
                found.append(f"nothing in it has a label {label}")
    return found


def unknown_values(metric: Metric, label: str, operator: str, value: str) -> list[str]:
    known = VALUES.get((metric.name, label))
    if known is None:
        return []
    wanted = value.split("|") if "~" in operator else [value]
    return [f"{metric.name} has no {label}={each}" for each in wanted if each not in known]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(coslice_hold_seconds_total[5m])", "no metric"),
        ("coslice_leader_bucket", "no metric"),
        ('coslice_faults_total{cause="lost"}', "no label cause"),
        ('coslice_faults_total{reason=~"overran|asleep"}', "no reason=asleep"),
        ("sum by (node) (coslice_faults_total)", "label node"),
        ("coslice_leader / on (job_id) coslice_job_turns_total", ""),
    ],
)
def test_the_check_itself_finds_what_does_not_exist(expr: str, problem: str) -> None:
    found = problems(expr)
    assert (problem in " ".join(found)) if problem else not found


def test_every_rule_asks_for_what_exists() -> None:
    assert len(rules()) > 15
    for rule in rules():
        assert problems(rule["expr"]) == [], rule


def test_two_installations_are_not_taken_for_two_leaders_of_one() -> None:
    """Orchestrators that share no store may share a Prometheus."""
    told = [alert["expr"] for alert in alerts() if re.search("coslice_(leader|standbys)", alert["expr"])]
    assert len(told) == 3
    for expr in told:
        assert re.findall(r"\b(?:sum|max)\b(?! by \(job, namespace\))", expr) == [], expr


def test_every_panel_asks_for_what_exists_and_names_its_curves_by_labels_it_kept() -> None:
    shown = [(panel, target) for panel in panels() for target in panel["targets"]]
    assert len(shown) > 20
    for panel, target in shown:
        assert problems(target["expr"]) == [], panel["title"]
        kept = {each.strip() for names in _LABELS.findall(target["expr"]) for each in names.split(",")}
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= kept, (panel["title"], legend - kept)
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    for name, label in re.findall(r"label_values\((\w+), (\w+)\)", json.dumps(variables)):
        metric = series(name)
        assert metric is not None
        assert label in metric.labels


def test_every_panel_has_a_place_of_its_own() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels()]
    assert len(set(places)) == len(places)
    everything = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)


def test_the_dashboard_is_what_its_tool_writes() -> None:
    tool = load(ROOT / "tools" / "grafana.py")
    assert json.loads(DASHBOARD.read_text()) == tool.dashboard()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_that_were_asked_for_are_on_the_dashboard_or_alarm() -> None:
    """What nobody looks at is no use: every metric is shown, or alarmed on, or named here with its reason."""
    text = DASHBOARD.read_text() + RULES.read_text()
    elsewhere = {
        "coslice_info",  # joined by hand
        "coslice_decisions_total",  # for questions nobody had yet
        "coslice_groups",
        "coslice_group_door_depth",
        "coslice_group_jobs",
        "coslice_group_residents",
        "coslice_group_lease_age_seconds",
        "coslice_group_unconfirmed_grants",
        "coslice_group_lost_sessions",
        "coslice_group_swaps_total",
        "coslice_group_moved_bytes_total",  # the agents' figures say more
        "coslice_agents_attached",  # per group: coslice_group_nodes
        "coslice_job_turns_total",
        "coslice_agent_contexts",
        "coslice_agent_members",
        "coslice_agent_job_bytes",
        "coslice_agent_operation_seconds",
        "coslice_agent_operations_total",
    }
    unused = {metric.name for metric in ALL if metric.name not in text}
    assert unused == elsewhere


def test_every_alert_has_a_severity_a_summary_and_a_runbook() -> None:
    text = RUNBOOKS.read_text()
    headings = {
        re.sub(r"[^\w-]", "", line.strip("# ").lower()) for line in text.splitlines() if line.startswith("#")
    }
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"]
        file, _, heading = alert["annotations"]["runbook"].partition("#")
        assert (ROOT / file) == RUNBOOKS
        assert heading == alert["alert"].lower()
        assert heading in headings, f"no runbook for {alert['alert']}"
    written = set(re.findall(r"^### (Coslice\w+)$", text, re.M))
    assert written == set(names)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_accepts_the_rules_and_they_alarm_when_they_should() -> None:
    folder = RULES.parent
    for arguments in (("check", "rules", RULES.name), ("test", "rules", "coslice.rules.test.yaml")):
        done = subprocess.run(
            ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
