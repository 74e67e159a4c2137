"""A real Prometheus beside a real SuperLink: it takes the rules, asks what the dashboard asks, sees sites and runs."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from common import flower
from common.deploy import keys
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy import certs, nodes
from server.deploy.control import Control
from server.deploy.processes import Family, held_ports, stop
from tests.server.test_watch_files import FOLDER, alerts, queries
from tests.support.patience import until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.rest,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here (apt-get install prometheus)"),
]


class World:
    """`superlink --metrics` with TLS and a nodes file, one of its sites, and a Prometheus that scrapes both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.families = folder, dict[str, Family]()
        self.fleet, self.control, self.metrics, self.site, self.web = held_ports(5)
        certs.write(folder / "certs", ["localhost"], [], 10)
        for name in ("here", "never"):
            nodes.add(folder / "nodes.toml", name, keys.generate(folder / f"{name}.key"))
        options = ["--certs", folder / "certs", "--nodes", folder / "nodes.toml", "--state", folder / "state"]
        options += ["--fleet-port", self.fleet, "--control-port", self.control, "--metrics", self.metrics]
        self.start("superlink", sys.executable, "-m", "server", "superlink", *options)
        options = ["--server", f"127.0.0.1:{self.fleet}", "--name", "here", "--key", folder / "here.key"]
        options += ["--ca", self.ca, "--memory", folder / "memory", "--metrics", self.site]
        self.start("site", sys.executable, "-m", "client", "join", *options)
        self.start("prometheus", shutil.which("prometheus"), *self.prometheus())

    def start(self, name: str, *words: object) -> None:
        # Not in the project's folder: a SuperLink makes run folders where it stands.
        environment = {**flower.environment(), "PYTHONPATH": str(ROOT)}
        self.families[name] = Family(list(map(str, words)), environment, self.folder / f"{name}.log", self.folder)

    def prometheus(self) -> list[str]:
        targets = [f"127.0.0.1:{port}" for port in (self.metrics, self.site)]
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yml")],
            "scrape_configs": [{"job_name": "fedkeel", "static_configs": [{"targets": targets}]}],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        web = f"--web.listen-address=127.0.0.1:{self.web}"
        return [f"--config.file={self.folder / 'prometheus.yml'}", f"--storage.tsdb.path={self.folder / 'tsdb'}", web]

    @property
    def ca(self) -> Path:
        return self.folder / "certs" / "ca.pem"

    def wait(self, true: Any) -> None:
        until(true, lambda: {name: family.tail() for name, family in self.families.items()}, 60)

    def get(self, path: str, **words: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.web}/api/v1/{path}", params=words)
        assert answer.status_code == 200, (words, answer.text)
        return answer.json()["data"]

    def ask(self, query: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of labels -> what a query is now."""
        with contextlib.suppress(httpx.TransportError):
            found = self.get("query", query=query)["result"]
            return {tuple(each["metric"].get(label, "") for label in labels): float(each["value"][1]) for each in found}
        return {}

    def firing(self) -> set[tuple[str, str]]:
        return {(a["labels"]["alertname"], a["labels"].get("site", "")) for a in self.get("alerts")["alerts"]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        yield made
    finally:
        stop(list(made.families.values()), 10)


def test_a_real_prometheus_takes_rules_and_queries_and_sees_sites_and_runs(world: World) -> None:
    world.wait(lambda: world.ask("fedkeel_superlink_site_connected", "site") == {("here",): 1, ("never",): 0})
    for query in queries():
        world.get("query", query=query)
    text = Experiment.model_validate({"name": "first", "round": {"wait_for": 2}, "partition": {"clients": 2}}).toml()
    control = Control(f"127.0.0.1:{world.control}", world.ca)
    for _ in range(2):
        control.ask("POST", "/fedkeel/v1/queue", {"experiment": text})
    waiting = 'fedkeel_superlink_run_state{state="waiting"} == 1'
    world.wait(lambda: world.ask(waiting, "run") == {("first q2",): 1})
    going = 'fedkeel_superlink_run_state{state=~"starting|running"} == 1'
    world.wait(lambda: ("first",) in world.ask(going, "run"))
    assert world.ask("fedkeel_superlink_run_queue_place", "run") == {("first q2",): 1}
    # Every rule was evaluated, and a site that leaves is on its way to an alert; the one that never came is not.
    world.families["site"].process.terminate()
    world.wait(lambda: ("FedkeelSiteGone", "here") in world.firing())
    assert ("FedkeelSiteGone", "never") not in world.firing()
    rules = [rule for group in world.get("rules")["groups"] for rule in group["rules"]]
    assert sorted(rule["name"] for rule in rules) == sorted(rule["alert"] for rule in alerts())
    assert {rule["health"] for rule in rules} == {"ok"}, rules
