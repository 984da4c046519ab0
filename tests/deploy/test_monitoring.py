"""Alerts, dashboard and scaling query existing metrics, and every alert is documented."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from overlays import of_kind
from queries import check_query

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
SCENARIOS = yaml.safe_load(Path(__file__).with_name("alert_scenarios.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
TRIGGERS = [trigger for scaled in of_kind("autoscaling", "ScaledObject") for trigger in scaled["spec"]["triggers"]]


@pytest.mark.parametrize(
    "query",
    [
        *(pytest.param(rule["expr"], id=f"{rule['alert']}-{rule['labels']['severity']}") for rule in ALERTS),
        *(pytest.param(target["expr"], id=panel["title"]) for panel in PANELS for target in panel.get("targets", ())),
        *(pytest.param(trigger["metadata"]["query"], id=f"trigger {i}") for i, trigger in enumerate(TRIGGERS)),
    ],
)
def test_queries_use_documented_metrics(query: str) -> None:
    check_query(query)


@pytest.mark.parametrize(
    "query",
    [
        "sum(pdserve_nodes)",
        "sum(rate(pdserve_steps_total[2m])",
        'pdserve_kv_blocks{state="free"}',
        'pdserve_kv_blocks{use="lost"}',
        'pdserve_kv_use_ratio{component="router"}',
        "sum by (peer) (pdserve_steps_total)",
        'pdserve_time_to_first_token_seconds_bucket{le="2"}',
    ],
)
def test_unknown_metrics_in_queries_are_detected(query: str) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_query(query)


def test_each_alert_has_its_section() -> None:
    sections = re.findall(r"^## (Pdserve\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert len(set(sections)) == len(sections)
    assert set(sections) == {rule["alert"] for rule in ALERTS}
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in ALERTS)
    assert all(rule["annotations"]["summary"] for rule in ALERTS)


def test_each_alert_fires_in_a_scenario() -> None:
    tests = [test for scenario in SCENARIOS["tests"] for test in scenario["alert_rule_test"]]
    assert {test["alertname"] for test in tests if "exp_alerts" in test} == {rule["alert"] for rule in ALERTS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, which comes with Prometheus, is not here")
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES))
    (tmp_path / "scenarios.yaml").write_text(yaml.safe_dump(SCENARIOS))
    done = subprocess.run(["promtool", "test", "rules", "scenarios.yaml"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_grafana_dashboard_equals_the_script_output() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "make-dashboard", "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_grafana_dashboard_is_valid() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for one, other in itertools.combinations([panel["gridPos"] for panel in PANELS], 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(PANELS)))
    assert used == variables
    for panel in PANELS:
        targets = panel.get("targets", [])
        assert bool(targets) is (panel["type"] != "row")
        assert len({target["refId"] for target in targets}) == len(targets)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)


def test_grafana_sidecar_selects_the_dashboard() -> None:
    (config_map,) = of_kind("multi-node", "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["pdserve.json"]) == DASHBOARD


@pytest.mark.parametrize(
    "scaled", of_kind("autoscaling", "ScaledObject"), ids=lambda manifest: manifest["metadata"]["name"]
)
def test_scale_up_is_fast_scale_down_slow_and_one_node_stays(scaled: dict[str, Any]) -> None:
    spec = scaled["spec"]
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert "idleReplicaCount" not in spec
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]
