"""The dashboard and the alert rules ask for what is served, and for nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from client.node.metrics import ClientMetrics
from common.flower import ROOT
from server.watch.metrics import RunMetrics
from server.watch.names import MOST_SITES
from tests.server.test_link_metrics import a_run, a_site, asking

FOLDER = ROOT / "docker" / "watch"
RECORD: dict[str, Any] = {
    "round": 1,
    "sampled": ["a", "b"],
    "accepted": ["a"],
    "dropped": {"b": "outlier: delta"},
    "causes": {"b": "invalid"},
    "steps": {"a": 7},
    "examples": {"a": 11},
    "norms": {"a": 2.5},
    "seconds": {"total": 1.0, "collect": 0.5},
    "bytes_down": 3,
    "bytes_up": 4,
    "central": {"loss": 1.0, "accuracy": 0.5},
}


def samples(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Every series' name -> its labels."""
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def served() -> dict[str, set[str]]:
    """What a run and a site serve."""
    run, site = RunMetrics(), ClientMetrics(names=["a"])
    run.record(RECORD)
    site.answered("a", "train", "ok", {"work": 1.0}, 1, 1, {"loss": 1.0})
    link = CollectorRegistry()
    link.register(asking([a_site("a")], [a_run("q", "waiting"), a_run("r", "running", rounds=9, round_at=1.0)]))
    return samples(run.registry) | samples(site.registry) | samples(link) | {"up": {"job", "instance"}}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """What the dashboard asks."""
    panels = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def expressions() -> list[str]:
    return [rule["expr"] for rule in alerts()] + queries()


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_served(expression: str) -> None:
    names = re.findall(r"\b(?:fedkeel_\w+|up)\b(?!=|\")", expression)
    known = served()
    assert names
    for name in names:
        assert name in known, name
    for labels in re.findall(r"\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)=", labels):
            assert any(label in known[name] for name in names), label
    assert expression.count("(") == expression.count(")")


def test_every_rule_says_what_it_means() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all(rule["annotations"]["summary"].endswith(".") for rule in rules)


def test_prometheus_takes_the_rules() -> None:
    if not shutil.which("promtool"):
        pytest.skip("no promtool here (apt-get install prometheus)")
    subprocess.run(["promtool", "check", "rules", str(FOLDER / "alerts.yml")], check=True, timeout=30)


def test_what_each_site_did() -> None:
    run = RunMetrics()
    run.record(RECORD)
    run.record({**RECORD, "round": 2, "void": [{"dropped": {"a": "offline: gone"}, "causes": {"a": "offline"}}]})
    value = run.registry.get_sample_value
    assert value("fedkeel_site_rounds_total", {"site": "a"}) == 2
    assert value("fedkeel_site_steps_total", {"site": "a"}) == 14
    assert value("fedkeel_site_examples", {"site": "a"}) == 11
    assert value("fedkeel_site_upload_norm", {"site": "a"}) == 2.5
    assert value("fedkeel_site_dropped_total", {"site": "b", "cause": "invalid"}) == 2
    assert value("fedkeel_site_dropped_total", {"site": "a", "cause": "offline"}) == 1


def test_any_number_of_names_makes_a_bounded_number_of_series() -> None:
    run = RunMetrics()
    for round in range(1, 4):
        names = [f"site-{round}-{number}" for number in range(MOST_SITES)]
        run.record({"round": round, "accepted": names, "dropped": dict.fromkeys(names, "late"), "causes": {}})
    sites = {
        sample.labels["site"]
        for family in run.registry.collect()
        for sample in family.samples
        if "site" in sample.labels
    }
    assert len(sites) == MOST_SITES + 1
    assert "other" in sites
