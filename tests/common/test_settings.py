"""Settings are taken as written: a value of another type is an error that names key, value and what is allowed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from client.policy import Policy
from common.deploy import keys
from common.errors import SettingsError
from common.experiment import Experiment
from common.settings import Section, dotted
from server.compare.plan import Plan
from server.deploy import nodes
from strategies.protocol.participation import Participation
from strategies.registry import REGISTRY, cautions, hyperparameter_names, settled, written_out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('rounds = "5"', "rounds = '5'"),
        ("rounds = 5.0", "rounds = 5.0"),
        ("rounds = true", "rounds = True"),
        ("local.lr = true", "local.lr = True"),
        ('local.lr = "0.1"', "local.lr = '0.1'"),
        ("local.nesterov = 1", "local.nesterov = 1"),
        ("local.betas = [0.9]", "local.betas"),
        ('strategy.name = "hafedho"\nstrategy.mu = "0.1"', "strategy.mu = '0.1'"),
        ('strategy.name = "hafedho"\nstrategy.upload = "psi"', "'phi', 'displacement' or 'raw'"),
    ],
)
def test_wrong_types_are_errors(text: str, message: str) -> None:
    """Neither text nor booleans become numbers silently."""
    with pytest.raises(SettingsError) as caught:
        settled(Experiment.parse(text))[0]
    assert message in str(caught.value)


SETTINGS = [key for key, _ in dotted(Experiment().model_dump()) if not key.endswith(".name")]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_setting_is_infinite(value: str) -> None:
    """Of the experiment, of every algorithm and of every task: refused by its key, whatever its type."""
    keys = [*SETTINGS, *(f"{key}[0]" for key in ("local.betas", "speed.epochs", "speed.speeds"))]
    for key in keys:
        given = f"{key.removesuffix('[0]')} = " + (f"[{value}, 0.5]" if key.endswith("[0]") else value)
        with pytest.raises(SettingsError, match=re.escape(key.removesuffix("[0]"))):
            Experiment.parse(given)
    for name, entry in REGISTRY.items():
        for key in hyperparameter_names(entry.cls):
            with pytest.raises(SettingsError, match=rf"strategy.{key} = {value}"):
                settled(Experiment.parse(f'strategy = {{name = "{name}", {key} = {value}}}'))[0]
    for module in ("digits", "images", "quadratic", "shakespeare", "text"):
        importlib.import_module(f"common.tasks.{module}")
    assert all(table.model_config["allow_inf_nan"] is False for table in tables(Section))


def tables(cls: type[Section]) -> list[type[Section]]:
    return [cls, *(each for sub in cls.__subclasses__() for each in tables(sub))]


def test_a_finite_number_is_asked_for() -> None:
    with pytest.raises(SettingsError, match=r"^experiment: local.lr = inf: Input should be a finite number$"):
        Experiment.parse("local.lr = inf")


@pytest.mark.parametrize("name", ["Zürich", "a b", "../x", "", ".a", "-a", "a/b", "x" * 101, "x" * 5000])
def test_a_name_is_asked_for_by_a_sentence(name: str) -> None:
    """No regular expression, and a long name is not echoed whole."""
    with pytest.raises(SettingsError) as caught:
        Experiment.parse(f'name = "{name}"')
    assert "a name has 1 to 100 of the letters a-z and A-Z, digits, '.', '_' and '-', and begins" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "[A-Z" not in str(caught.value)


def test_a_long_value_is_not_echoed_whole() -> None:
    with pytest.raises(SettingsError) as caught:
        Experiment.parse(f'rounds = "{"9" * 5000}"\n{"k" * 20} = "{"v" * 5000}"')
    assert len(str(caught.value)) < 1000


def test_every_toml_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Windows' editors write one."""

    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        return tmp_path / name

    text = 'name = "a"\nrounds = 3'
    assert Experiment.load(written("a.toml", text)) == Experiment.parse(text) == Experiment.parse("\ufeff" + text)
    plan = Plan.read(written("plan.toml", 'name = "p"\nbase = "a.toml"'))[1]
    assert plan.base == {"name": "a", "rounds": 3}
    assert Policy.load(str(written("policy.toml", "max_steps = 5"))).max_steps == 5
    nodes.add(file := tmp_path / "nodes.toml", "a", keys.generate(tmp_path / "a.key"))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert list(nodes.read(file)) == ["a"]
    trace = written("trace.csv", "client,first,last\n0,1,2\n")
    Participation(Experiment.parse(f'presence = {{kind = "trace", file = "{trace}"}}')).check(["0"])


def test_integers_are_numbers() -> None:
    """TOML writes 1 for 1.0."""
    settings = Experiment.parse("local.lr = 1\nlocal.betas = [0, 0.5]")
    assert (settings.local.lr, settings.local.betas) == (1.0, (0.0, 0.5))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_resolved_experiment_means_the_same(name: str) -> None:
    """Written out in full or in part, as TOML or as JSON, a resolved experiment comes back equal."""
    resolved = settled(Experiment.parse(f'strategy.name = "{name}"\nround.sample = 3'))[1]
    for text in (resolved.toml(), resolved.toml(full=True)):
        assert settled(Experiment.parse(text))[1] == resolved
    assert resolved.identity == settled(Experiment.parse(resolved.toml(full=True)))[1].identity
    assert settled(resolved)[0] == settled(Experiment.parse(f'strategy.name = "{name}"\nround.sample = 3'))[0]


@pytest.mark.parametrize("name", REGISTRY)
def test_written_out_nothing_is_left_to_defaults(name: str) -> None:
    """Every hyperparameter stands in the text, which reads back equal, means the same and has the same hash."""
    given = Experiment.parse(f'strategy.name = "{name}"')
    strategy, whole = settled(given)
    written = written_out(strategy, whole)
    again = Experiment.parse(written.toml(full=True))
    assert again == written == written_out(*settled(again)) == written_out(*settled(whole))
    assert again.identity == written.identity
    assert settled(again)[0] == settled(given)[0]
    unset = {key for key in hyperparameter_names(REGISTRY[name].cls) if getattr(settled(given)[0], key) is None}
    assert written.strategy.options.keys() == {*hyperparameter_names(REGISTRY[name].cls)} - unset


@pytest.mark.parametrize(("moments", "warned"), [("reset", True), ("keep", False)])
def test_soaps_lost_step_is_told(moments: str, warned: bool) -> None:
    """With moments reset each round, one of the steps moves no matrix."""
    experiment = Experiment.parse(f'local = {{optimizer = "soap", moments = "{moments}"}}')
    found = cautions(settled(experiment)[0], experiment, 7)
    assert len(found) == warned
    assert all("the first of 7 steps a round" in text for text in found)
