"""A hash of what data look like: the same for data of one kind, whatever is in them; another for another kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from client.app import _roll
from common.data.examples import Examples
from common.data.schema import LETTERS, schema_hash
from common.experiment import Experiment
from common.flower import versions
from server.deploy.runs_api import _odd
from server.rounds.prepare import prepare
from strategies.protocol.members import members_of
from strategies.protocol.messages import HEAD, RollHead, RollReply, read_head, write_head
from tests.support.faults import FaultyGrid, ran, toy

VECTORS = Examples(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path


def same(paths: list[Path], examples: Examples = VECTORS) -> bool:
    hashes = {schema_hash(path, examples) for path in paths}
    assert all(len(each) == LETTERS and int(each, 16) >= 0 for each in hashes)
    return len(hashes) == 1


CSV = "age,weight,label\n1,2.5,a\n"
NPZ = {"x": np.zeros((5, 4), np.float32), "y": np.zeros(5, np.int64)}


@pytest.mark.parametrize(
    ("name", "content", "alike", "others"),
    [
        (
            "a.csv",
            CSV,
            ["age,weight,label\n3,,b\n4,5,c\n", "age,weight,label\n1.5,NA,d\n", "label,weight,age\nx,1,2\n"],
            [
                "age,weight,outcome\n1,2.5,a\n",
                "age,weight,label\nold,2.5,a\n",
                "age,label\n1,a\n",
            ],
        ),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n',
            ['{"text": "longer", "label": 2.5}\n{"text": "", "label": 0}\n'],
            ['{"text": "x", "class": 1}\n', '{"text": ["x"], "label": 1}\n'],
        ),
        (
            "a.npz",
            NPZ,
            [
                {"x": np.ones((9, 4), np.float64), "y": np.ones(9, np.int32)},
                {"y": np.zeros(5, np.int64), "x": np.zeros((5, 4), np.float32)},
            ],
            [
                {**NPZ, "x": np.zeros((5, 3))},
                {**NPZ, "x": np.zeros((5, 4), np.uint8)},
                {**NPZ, "classes": np.array(["sick", "well"])},
                {"inputs": NPZ["x"], "y": NPZ["y"]},
            ],
        ),
    ],
)
def test_values_do_not_count_and_what_they_are_called_does(
    name: str, content: Any, alike: list[Any], others: list[Any], tmp_path: Path
) -> None:
    first = written(tmp_path / "0" / name, content)
    paths = [written(tmp_path / f"alike-{i}" / name, each) for i, each in enumerate(alike)]
    assert same([first, *paths])
    for i, other in enumerate(others):
        assert not same([first, written(tmp_path / f"other-{i}" / name, other)]), other


def test_the_same_table_in_a_folder_packed_or_with_tabs(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.csv", CSV)
    packed = written(tmp_path / "b.csv.gz", CSV)
    tabs = written(tmp_path / "c.tsv", CSV.replace(",", "\t"))
    folder = written(tmp_path / "d" / "train.csv", CSV)
    written(tmp_path / "d" / "test.csv", "other\n1\n")
    assert same([plain, packed, tabs, folder.parent])


def test_tables_that_other_programs_wrote(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    for name, ages in (("a", [1, 2]), ("b", [1.5])):
        table = pa.table({"age": ages, "label": ["x"] * len(ages)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert same([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    info = {"features": {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}
    for name, names in (("c", ["cat", "dog"]), ("d", ["dog", "cat"])):
        info["features"]["label"]["names"] = names
        written(tmp_path / name / "state.json", "{}")
        written(tmp_path / name / "dataset_info.json", json.dumps(info))
    assert not same([tmp_path / "c", tmp_path / "d"])


def test_examples_count_by_shape_and_kind_and_texts_not_by_their_length() -> None:
    def of(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> str:
        return schema_hash(None, Examples(inputs, torch.zeros(len(inputs)) if targets is None else targets))

    assert of(torch.zeros(3, 2)) == of(torch.ones(7, 2, dtype=torch.float64)) != of(torch.zeros(3, 3))
    assert of(torch.zeros(3, 2, 2, dtype=torch.uint8)) != of(torch.zeros(3, 2, 2))
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    assert of(tokens) == of(tokens[:, :5])
    assert of(tokens) != of(tokens, torch.zeros(3, dtype=torch.int64))
    assert schema_hash(None, object()) == schema_hash(None, object())  # type: ignore[arg-type]


SECRETS = {**NPZ, "secret_key": np.zeros(5)}


def asked(tmp_path: Path, run: str = "r", policy: str = "") -> RollReply:
    """What a site with an .npz of its own answers to a roll call."""
    task = {"name": "npz", "pooled": False, "shape": [4], "classes": 2}
    text = Experiment.model_validate({"name": "x", "task": task}).json()
    path = written(tmp_path / "secret-name.npz", SECRETS)
    config = {"name": "a", "data": str(path), "policy": policy}
    context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
    return read_head(RollReply, RecordDict({HEAD: _roll(RollHead(text, run), context, ["open"])}))


def test_a_site_tells_it_in_the_roll_call_unless_its_policy_says_no(tmp_path: Path) -> None:
    told = asked(tmp_path)
    assert not told.error
    assert len(told.data_schema) == LETTERS
    assert told.data_schema != asked(tmp_path, "another run").data_schema
    assert "secret" not in repr(told)
    policy = written(tmp_path / "policy.toml", "share_schema = false\n")
    assert asked(tmp_path, policy=str(policy)).data_schema == ""


def test_data_that_cannot_be_hashed_are_no_reason_to_refuse_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> str:
        raise ValueError("odd")

    monkeypatch.setattr("client.session.schema_hash", fault)
    told = asked(tmp_path, "odd")
    assert (told.data_schema, told.examples, told.error) == ("", [5], "")


def test_the_roll_of_a_run_has_it(tmp_path: Path) -> None:
    done = ran(tmp_path, toy(rounds=1), FaultyGrid(memory=str(tmp_path / "memory")))
    roll = json.loads((done.folder.path / "roll.json").read_text())
    assert len({member["data_schema"] for member in roll}) == 1
    assert len(roll[0]["data_schema"]) == LETTERS


@pytest.mark.parametrize("schema", ["0123abcdef12", "", "age,weight", "\x1b[2J", "f" * 10**6])
def test_what_is_no_hash_is_not_shown(schema: str) -> None:
    layout = prepare(toy()).model.layout_hash
    reply = RollReply(["a"], [1], [1], [1], [""], layout, "", "cpu", versions(), data_schema=schema)
    message = SimpleNamespace(has_error=lambda: False, content=RecordDict({HEAD: write_head(reply)}))
    (member,), _ = members_of(1, message, layout, "")  # type: ignore[arg-type]
    assert member.data_schema == (schema if schema == "0123abcdef12" else "f" * 64 if len(schema) > 64 else "")


@pytest.mark.parametrize(
    ("schemas", "odd"),
    [("aab", "b"), ("aa", ""), ("ab", "ab"), ("aabb", "ab"), ("aaab-", "b"), ("-", ""), ("", "")],
)
def test_who_differs_from_most(schemas: str, odd: str) -> None:
    roll: list[dict[str, Any]] = [{"data_schema": "" if each == "-" else each} for each in schemas]
    assert _odd([*roll, {}]) == set(odd)
