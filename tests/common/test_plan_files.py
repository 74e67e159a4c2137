"""Plans that leave the process: as a file, as a picture, as a table."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings
from common.flower import ROOT
from common.partition import file as plan_files
from common.partition.assignment import Assignment
from common.partition.make import make_assignment
from server.__main__ import cli
from server.commands.partition import skew
from server.report.pictures import partition_picture
from tests.common.test_partition import GROUPS, KINDS, LABELS, sizes
from tests.support.faults import ran


def written(path: Path, settings: PartitionSettings, labels: np.ndarray = LABELS, seed: int = 3) -> Assignment:
    made = make_assignment(settings, labels, GROUPS[: len(labels)], seed)
    path.write_text(plan_files.text(made, labels, settings, "npz"))
    return made


def of_file(path: Path, labels: np.ndarray = LABELS, seed: int = 3, **keys: object) -> Assignment:
    return make_assignment(
        PartitionSettings.model_validate({"kind": "file", "file": str(path), **keys}), labels, None, seed
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shift", ["none", "noise", "rotation"])
def test_a_plan_file_is_the_plan(name: str, shift: str, tmp_path: Path) -> None:
    """Hash, indices, counts and shift of the settings that made it; another run's seed makes no difference."""
    settings = KINDS[name].model_copy(update={"shift": shift, "shift_strength": 0.3})
    made = written(tmp_path / "plan.json", settings)
    for seed in (3, 4):
        read = of_file(tmp_path / "plan.json", seed=seed)
        assert (read.hash, read.seed, read.shift) == (made.hash, 3, shift)
        assert read.shift_strength == made.shift_strength
        assert read.class_counts.tolist() == made.class_counts.tolist()
        for a, b in zip((*read.clients, *read.holdout), (*made.clients, *made.holdout), strict=True):
            assert np.array_equal(a, b)
            assert a.dtype == np.int64
            assert not a.flags.writeable


def test_empty_clients_survive_a_plan_file(tmp_path: Path) -> None:
    """Without min_examples = 0 in the experiment: the file says who holds what."""
    settings = PartitionSettings(kind="dirichlet", clients=50, alpha=0.01, min_examples=0)
    made = written(tmp_path / "plan.json", settings)
    assert of_file(tmp_path / "plan.json").hash == made.hash
    assert min(sizes(made)) == 0


def test_a_plan_file_lies_where_data_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(tmp_path / "plan.json", KINDS["iid"])
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    assert of_file(Path("plan.json")).hash == made.hash


def test_a_plan_file_is_readable(tmp_path: Path) -> None:
    """JSON, a client a line."""
    written(tmp_path / "plan.json", KINDS["iid"])
    text = (tmp_path / "plan.json").read_text()
    assert len(text.splitlines()) == 18
    assert json.loads(text)["made_by"]["clients"] == 7


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    """Rows in any order, no evaluation, no hash: client 0 holds 5 and 2, client 1 nothing."""
    own = {"format": "fedkeel-plan-1", "data": {"examples": 400}, "clients": [{"train": [5, 2]}, {"train": []}]}
    (tmp_path / "own.json").write_text(json.dumps(own))
    made = of_file(tmp_path / "own.json")
    assert [part.tolist() for part in made.clients] == [[2, 5], []]
    assert made.seed == 3


def test_an_experiments_shift_replaces_the_files(tmp_path: Path) -> None:
    """The plan of the file's rows with the shift of the experiment."""
    written(tmp_path / "plan.json", KINDS["iid"])
    noisy = KINDS["iid"].model_copy(update={"shift": "noise"})
    assert of_file(tmp_path / "plan.json", shift="noise").hash == make_assignment(noisy, LABELS, None, 3).hash


def changed(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content | changes


def held(client: int, side: str, rows: list[object]) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> object:
        content["clients"][client][side] = rows
        return content

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(format="fedkeel-plan-2"), ["format = 'fedkeel-plan-2'", "fedkeel-plan-1"]),
        (changed(extra=1), ["extra = 1", "unknown key"]),
        (changed(clients=[]), ["clients = []"]),
        (changed(data={"examples": 399}), ["399 examples", "this one has 400"]),
        (changed(data={"examples": 400, "labels": "abc"}), ["sha256 abc", "another data set"]),
        (changed(hash="0" * 64), ["hash '000000000000'", "without `hash`"]),
        (changed(shift="blur"), ["shift = 'blur'", "'noise'"]),
        (held(3, "train", [400]), ["clients.3 holds row 400", "0 to 399"]),
        (held(3, "evaluate", [-1]), ["clients.3 holds row -1", "0 to 399"]),
        (held(3, "train", [10**30]), ["clients.3"]),
        (held(3, "train", [1.5]), ["clients.3.train.0 = 1.5"]),
        (held(3, "train", [7, 7]), ["row 7 is held by clients."]),
        (lambda content: held(3, "train", content["clients"][1]["train"])(content), ["by clients.1 and clients.3"]),
        (lambda content: {k: v for k, v in content.items() if k != "clients"}, ["clients = ", "Field required"]),
        (lambda content: [content], ["holds a list", "fedkeel-plan-1"]),
    ],
)
def test_a_wrong_plan_file_is_refused(
    change: Callable[[dict[str, Any]], object], words: list[str], tmp_path: Path
) -> None:
    """The message names file, place, value and what is allowed, and is never as long as the file."""
    path = tmp_path / "plan.json"
    written(path, KINDS["iid"])
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(SettingsError) as caught:
        of_file(path)
    for word in [*words, "plan.json"]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"plan\.json.* cannot be read as JSON"):
        of_file(tmp_path / "plan.json")


def test_a_plan_file_of_another_order_names_both_seeds(tmp_path: Path) -> None:
    written(tmp_path / "plan.json", KINDS["iid"])
    with pytest.raises(SettingsError, match="the file's seed is 3, this run's 8"):
        of_file(tmp_path / "plan.json", labels=LABELS[::-1].copy(), seed=8)


def test_a_missing_plan_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"partition.file = .*none.json.*no such file; looked for"):
        of_file(tmp_path / "none.json")


def test_clients_beside_a_plan_file_must_be_its_own(tmp_path: Path) -> None:
    written(tmp_path / "plan.json", KINDS["iid"])
    assert len(of_file(tmp_path / "plan.json", clients=7).clients) == 7
    with pytest.raises(SettingsError, match=r"partition.clients = 8: plan file .* has 7 clients"):
        of_file(tmp_path / "plan.json", clients=8)


# --- the command


DIGITS = 'name = "plans"\nrounds = 2\nlocal.lr = 0.1\n'
SPLIT = 'partition = {kind = "dirichlet", clients = 5, alpha = 0.3, shift = "noise", shift_strength = 0.2}\n'


def test_a_run_on_a_plan_file_has_the_weights_of_its_settings(tmp_path: Path) -> None:
    """The file that the command writes, in an experiment that says nothing else of the partition."""
    experiment, out = tmp_path / "digits.toml", tmp_path / "plan.json"
    experiment.write_text(DIGITS + SPLIT)
    picture = tmp_path / "plan.svg"
    said = CliRunner().invoke(cli, ["partition", str(experiment), "--out", str(out), "--picture", str(picture)])
    assert said.exit_code == 0, said.output
    direct = ran(tmp_path / "direct", Experiment.load(experiment))
    shared = ran(tmp_path / "shared", Experiment.parse(f'{DIGITS}partition = {{kind = "file", file = "{out}"}}'))
    assert shared.history[-1]["sha256"] == direct.history[-1]["sha256"]
    assert shared.folder.status()["plan"] == direct.folder.status()["plan"] == json.loads(out.read_text())["hash"]
    assert json.loads(out.read_text())["hash"] in said.output
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (DIGITS, ["--picture", "plan.jpg"], ["plan.jpg", ".png, .svg, .pdf"]),
        (DIGITS, ["--out", "missing/plan.json"], ["missing/plan.json", "cannot be written"]),
        ('task.name = "tests.support.tiny:task"', [], ["tests.support.tiny:task", "no pooled examples"]),
    ],
)
def test_the_command_says_what_is_wrong(
    text: str, options: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text(text)
    said = CliRunner().invoke(cli, ["partition", "e.toml", *options])
    assert said.exit_code == 2
    for word in words:
        assert word in said.output.replace("\n", "")


def test_skew_of_two_clients() -> None:
    """Client 0 holds 3 of class 0, client 1 one of class 1, client 2 nothing. The whole is (3/4, 1/4): distances 1/4
    and 3/4, weighted 3/4 1/4 + 1/4 3/4 = 3/8. Sizes 3, 1, 0: mean 4/3, variance 10/3 - 16/9 = 14/9."""
    label_skew, size_skew = skew(np.array([[3, 0], [0, 1], [0, 0]]))
    assert label_skew == pytest.approx(3 / 8)
    assert size_skew == pytest.approx(np.sqrt(14) / 4)
    assert skew(np.zeros((2, 3), np.int64)) == (0.0, 0.0)


@pytest.mark.parametrize("shape", [(1, 1), (10, 10), (40, 2), (41, 10), (1000, 62), (3, 200)])
def test_pictures_of_every_size(shape: tuple[int, int], tmp_path: Path) -> None:
    """Bubbles up to 40 x 40, a heat map beyond; with empty clients and nothing at all."""
    counts = np.random.default_rng(0).poisson(0.7, shape)
    counts[0] = 0
    figure = partition_picture(counts, [str(i) for i in range(shape[0])])
    figure.savefig(tmp_path / "picture.png")
    assert len(figure.axes) == (2 if max(shape) <= 40 else 3)
    upper, lower = figure.axes[:2]
    assert upper.get_xlim() == lower.get_xlim() == (-0.5, shape[0] - 0.5)
    assert 1 <= len(lower.get_xticks()) <= 25


def test_pictures_name_the_classes(tmp_path: Path) -> None:
    figure = partition_picture([[1, 2]], ["site"], ["cat", "$dog$"])
    figure.savefig(tmp_path / "picture.png")
    lower = figure.axes[1]
    assert [label.get_text() for label in lower.get_yticklabels()] == ["cat", "$dog$"]
    assert [label.get_text() for label in lower.get_xticklabels()] == ["site"]


def test_the_document_shows_what_the_command_prints_and_a_plan_that_works(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "partitions.md").read_text("utf-8")
    shown = document.split("experiments/digits.toml -->\n")[1].split("\n\n")[0]
    said = CliRunner().invoke(cli, ["partition", str(ROOT / "experiments" / "digits.toml")])
    assert said.output.rstrip() == textwrap.dedent(shown)
    (tmp_path / "own.json").write_text(document.split("<!-- -->\n")[1])
    made = of_file(tmp_path / "own.json", labels=np.arange(6))
    assert [part.tolist() for part in made.clients] == [[0, 2, 5], [3], []]
    assert made.holdout[0].tolist() == [1]
    table = document.split("## Kinds")[1].split("## ")[0].splitlines()
    kinds = {line.split("`")[1] for line in table if line.startswith("| `") and "kind" not in line}
    assert kinds == set(get_args(PartitionSettings.model_fields["kind"].annotation))
