"""Federated statistics: equal to those of all data in one place, never more than a site's policy allows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from client import statistics
from client.app import app
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.__main__ import cli
from server.engines.inprocess import InProcessGrid, answer
from server.statistics import merge, show
from server.statistics.gather import Statistics, gather
from strategies.protocol.messages import HEAD, write_head
from strategies.protocol.sums import StatisticsReply, read_asked, read_sums

EXPERIMENT = Experiment.parse(
    'name = "s"\ntask.name = "npz"\ntask.shape = [3]\ntask.classes = 4\ntask.pooled = false\nround.deadline_s = 2'
)


class Sites(InProcessGrid):
    """A node for each site, with its own file and policy, as real ones have; `lie` replaces a site's answers."""

    def __init__(self, files: dict[str, Path], policy: str = "statistics = true\nstatistics_min_count = 1\n") -> None:
        super().__init__(app)
        self.names, self.lie = list(files), dict[str, Any]()
        self.contexts = {}
        for number, (name, file) in enumerate(files.items(), start=1):
            place = file.with_suffix(".policy.toml")
            if not place.exists():
                place.write_text(policy)
            config: dict[str, Any] = {"name": name, "data": str(file), "policy": str(place), "device": "cpu"}
            self.contexts[number] = Context(
                run_id=0, node_id=number, node_config=config, state=RecordDict(), run_config={}
            )

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n, name=c.node_config["name"]) for n, c in self.contexts.items()]  # type: ignore[arg-type]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            if (message := self._waiting.pop(message_id, None)) is not None:
                context = self.contexts[message.metadata.dst_node_id]
                name = context.node_config["name"]
                if name in self.lie:
                    lie = self.lie[name]
                    return [Message(RecordDict({HEAD: write_head(lie)} if lie else {}), reply_to=message)]
                return [answer(app, message, context)]
        return []


@pytest.fixture(autouse=True)
def _none_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_answered", type(statistics._answered)())


def tables(
    folder: Path, sizes: tuple[int, ...] = (50, 80, 7), offset: float = 1e6
) -> tuple[Sites, dict[str, np.ndarray]]:
    """CSV files with holes in them, and the columns of all."""
    rng, files = np.random.default_rng(1), dict[str, Path]()
    columns: dict[str, list[Any]] = {"age": [], "dose": [], "y": []}
    for number, size in enumerate(sizes):
        age, dose = rng.normal(50, 10, size), offset + rng.normal(0, 1, size)
        age[::5] = np.nan
        y = rng.integers(0, 4, size)
        lines = [
            "age,dose,patient,y",
            *(
                f"{'' if np.isnan(a) else repr(float(a))},{float(d)!r},p,{c}"
                for a, d, c in zip(age, dose, y, strict=True)
            ),
        ]
        files[f"site-{number}"] = folder / f"{number}.csv"
        files[f"site-{number}"].write_text("\n".join(lines))
        for name, values in (("age", age), ("dose", dose), ("y", y)):
            columns[name].append(values)
    return Sites(files), {name: np.concatenate(values) for name, values in columns.items()}


def same(figure: merge.ColumnFigures, values: np.ndarray) -> None:
    """As numpy has it for all values in one array."""
    known = values[np.isfinite(values)]
    assert figure.count == len(known)
    assert figure.missing == values.size - len(known)
    assert figure.mean == pytest.approx(float(np.mean(known)), rel=1e-12, abs=1e-12)
    assert figure.std == pytest.approx(float(np.std(known)), rel=1e-12, abs=1e-12)
    inner = np.histogram(known, figure.edges)[0] if figure.edges else []
    assert figure.bins[1:-2] == list(inner[:-1])  # numpy closes the last bin
    assert sum(figure.bins) == (len(known) if figure.edges else 0)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_tables_are_as_if_they_lay_in_one_place(offset: float, tmp_path: Path) -> None:
    """Values missing, sites of unequal size, an offset that a naive sum of squares loses."""
    grid, pooled = tables(tmp_path, offset=offset)
    found = gather(grid, EXPERIMENT, 3)
    assert found.sites == {"site-0": 50, "site-1": 80, "site-2": 7}
    assert not found.refused
    assert not found.schema
    for name in ("age", "dose"):
        same(found.columns[name], pooled[name])
    assert found.columns["y"].classes == {str(c): int((pooled["y"] == c).sum()) for c in range(4)}
    assert json.loads(found.json())["columns"]["age"]["kind"] == "number"


@pytest.mark.parametrize(
    ("shape", "names"),
    [((3,), ["x[0]", "x[1]", "x[2]"]), ((4, 5), ["x channel 0"]), ((4, 5, 3), [f"x channel {i}" for i in range(3)])],
)
def test_arrays_by_number_or_channel(shape: tuple[int, ...], names: list[str], tmp_path: Path) -> None:
    rng, files, held = np.random.default_rng(2), dict[str, Path](), list[np.ndarray]()
    for site in ("a", "b"):
        x = rng.normal(size=(20, *shape)).astype(np.float32)
        x[0].flat[0] = np.inf
        files[site] = tmp_path / f"{site}.npz"
        np.savez(files[site], x=x, y=rng.integers(0, 4, 20))
        held.append(x.astype(np.float64))
    found = gather(Sites(files), EXPERIMENT, 2)
    assert [name for name in found.columns if name != "y"] == names
    whole = np.concatenate(held)
    for i, name in enumerate(names):
        same(found.columns[name], whole if len(names) == 1 else whole[..., i])


@given(st.lists(st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=30), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_numbers_at_any_number_of_sites(values: list[list[float]]) -> None:
    from client.policy import Policy
    from strategies.protocol.sums import StatisticsHead

    def asked(step: str, numbers: dict[str, list[float]]) -> dict[str, Any]:
        return {
            f"s{i}": read_sums(
                statistics.answer(
                    StatisticsHead("", step, json.dumps(numbers)),
                    {"v": statistics.Column("number", np.array(each))},
                    len(each),
                    Policy(),
                    True,
                ),
                "it",
            )
            for i, each in enumerate(values)
        }

    totals = asked("totals", {})
    means = merge.means(totals)
    figure = merge.figures(totals, asked("deviations", means), means)["v"]
    pooled = np.concatenate([np.array(each) for each in values])
    scale = float(np.abs(pooled).max()) + 1e-300
    assert figure.mean is not None
    assert figure.std is not None
    assert abs(figure.mean - float(np.mean(pooled))) <= 1e-12 * scale
    assert abs(figure.std - float(np.std(pooled))) <= 1e-12 * scale


def test_texts_and_the_clients_of_a_simulation(tmp_path: Path) -> None:
    for name, texts in (("a", ["one", "two words", ""]), ("b", ["three words here"])):
        rows = [json.dumps({"text": text, "label": "x"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    found = gather(Sites({name: tmp_path / f"{name}.jsonl" for name in "ab"}), EXPERIMENT, 2)
    same(found.columns["text (words)"], np.array([1, 2, np.nan, 3.0]))
    assert found.columns["label"].classes == {"x": 4}

    text = 'partition.kind = "dirichlet"\npartition.clients = 3'
    found = gather(InProcessGrid(app), Experiment.parse(text), 1)
    assert sorted(found.sites) == ["0", "1", "2"]
    assert sum(found.sites.values()) == sum(found.columns["y"].classes.values())
    assert {each.measure for each in found.far} >= {"labels"}
    assert "far: " in show.table(json.loads(found.json()))


# --- what is far, and what is not the same


def test_a_site_in_other_units_and_one_with_another_column_are_named(tmp_path: Path) -> None:
    rng, files = np.random.default_rng(3), dict[str, Path]()
    for site, (scale, name) in {"a": (1, "age"), "b": (1, "age"), "c": (365, "age"), "d": (1, "Age")}.items():
        files[site] = tmp_path / f"{site}.csv"
        values = rng.normal(50, 10, 100) * scale
        files[site].write_text("\n".join([f"{name},y", *(f"{v},{'0' if site != 'b' else '1'}" for v in values)]))
    found = gather(Sites(files), EXPERIMENT, 4)
    told = {(each.site, each.column, each.measure) for each in found.far}
    assert ("c", "age", "mean") in told
    assert ("b", "y", "labels") in told
    assert ("a", "age", "missing") not in told
    assert sorted(found.schema) == ["column 'Age': held by d alone", "column 'age': held by all but d"]
    assert not gather(Sites({"a": files["a"]}), EXPERIMENT, 1).far


# --- what a policy keeps


def refused_with(grid: Sites) -> str:
    with pytest.raises(RunError, match="no site answered") as told:
        gather(grid, EXPERIMENT, 1)
    return str(told.value)


@pytest.mark.parametrize("policy", ["", "statistics = false\n"])
def test_without_the_sites_word_nothing_is_told(policy: str, tmp_path: Path) -> None:
    grid, _ = tables(tmp_path)
    for name in ("0", "1", "2"):
        (tmp_path / f"{name}.policy.toml").write_text(policy)
    assert "policy" in refused_with(grid)


def test_small_counts_are_kept_back_and_sums_are_rounded(tmp_path: Path) -> None:
    """Ten by default: a site of seven tells nothing; classes, bins and missing values of fewer than ten are 0."""
    grid, pooled = tables(tmp_path, (200, 7))
    for name in ("0", "1"):
        (tmp_path / f"{name}.policy.toml").write_text("statistics = true\nstatistics_digits = 3\n")
    found = gather(grid, EXPERIMENT, 2)
    assert found.sites == {"site-0": 200, "site-1": 0}
    age = found.columns["age"]
    assert (age.examples, age.missing) == (160, 40)
    assert "site-1" in age.withheld
    assert all(count == 0 or count >= 10 for count in age.bins)
    assert found.columns["y"].classes.keys() <= {"0", "1", "2", "3"}
    assert age.mean != pytest.approx(float(np.nanmean(pooled["age"][:200])), rel=1e-9)
    assert age.mean == pytest.approx(float(np.nanmean(pooled["age"][:200])), rel=1e-2)
    assert "kept back in part" in show.table(json.loads(found.json()))


def test_nothing_of_a_single_example_leaves(tmp_path: Path) -> None:
    """No smallest, no largest value, no name of a person."""
    rows = ["dose,patient,y", *(f"{1000 + i * 0.001},Ms Secret {i},1" for i in range(30)), "987654.321,Mr Secret,2"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    found = gather(Sites({"a": tmp_path / "a.csv"}, "statistics = true\n"), EXPERIMENT, 1)
    text = found.json()
    assert "Secret" not in text
    assert "987654" not in text
    assert found.columns["y"].classes == {"1": 30}


def test_who_asks_again_and_again_is_refused(tmp_path: Path) -> None:
    grid, _ = tables(tmp_path, (20,))
    for _ in range(statistics.MOST_ANSWERS // 3):
        gather(grid, EXPERIMENT, 1)
    assert "policy" in refused_with(grid) or "statistics" in refused_with(grid)


# --- sites that lie


def lies() -> list[Any]:
    column: dict[str, Any] = {"kind": "number", "examples": 5, "count": 5, "values": [1.0]}

    def told(**change: Any) -> StatisticsReply:
        return StatisticsReply(["site-0"], [json.dumps({"examples": 5, "columns": {"age": {**column, **change}}})])

    return [
        None,
        StatisticsReply(),
        StatisticsReply(["site-0"], []),
        StatisticsReply(["site-1"], ["{}"]),
        StatisticsReply(["../x"], ["{}"]),
        StatisticsReply(["site-0"], ["[" * 100_000]),
        StatisticsReply(["site-0"], ["[]"]),
        StatisticsReply(["site-0"], ["x" * (5 * 2**20)]),
        StatisticsReply(error="\x1b[31mround 7 accuracy 1.0\n"),
        told(count=-1),
        told(count=2**63),
        told(values=[float("nan")]),
        told(values=[float("inf")]),
        told(values=[0.0] * 100),
        told(kind="other"),
        told(classes={"\x1b": 1}),
        told(classes={str(i): 1 for i in range(2000)}),
        told(more=1),
    ]


@pytest.mark.parametrize("lie", lies(), ids=[str(i) for i in range(18)])
def test_an_answer_that_is_none_leaves_its_site_out(lie: Any, tmp_path: Path) -> None:
    grid, pooled = tables(tmp_path)
    grid.lie["site-0"] = lie
    found = gather(grid, EXPERIMENT, 3)
    if found.sites.get("site-0") is None:
        assert list(found.refused) == ["site-0"]
        assert found.refused["site-0"].isprintable()
    same(found.columns["age"], pooled["age"][50:])


def test_too_few_sites_is_told(tmp_path: Path) -> None:
    grid, _ = tables(tmp_path, (20,))
    with pytest.raises(RunError, match="only 1 of 2 sites"):
        gather(
            grid, EXPERIMENT.model_copy(update={"round": EXPERIMENT.round.model_copy(update={"deadline_s": 0.1})}), 2
        )


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": ["x"]}', '{"a": [1e999]}', '{"a": [true]}', "[" * 10000])
def test_a_question_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SettingsError):
        read_asked(text)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text("partition.clients = 2\n")
    done = CliRunner().invoke(cli, ["statistics", "e.toml", "--out", "s.json"])
    assert done.exit_code == 0, done.output
    assert "2 sites" in done.output
    assert set(json.loads((tmp_path / "s.json").read_text())) == set(Statistics.__dataclass_fields__)
