"""The partition plan: a function of settings, data and seed, disjoint, refused where it cannot work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.partition import Plan, make_plan, split_holdout

LABELS = np.arange(400) % 10
GROUPS = np.array([7, 3, 11, 5])[np.arange(400) % 4]

KINDS = {
    "iid": PartitionSettings(kind="iid", clients=7),
    "dirichlet": PartitionSettings(kind="dirichlet", clients=7, alpha=1.0),
    "pathological": PartitionSettings(kind="pathological", clients=20, classes_per_client=2),
    "shards": PartitionSettings(kind="shards", clients=10, shards_per_client=2),
    "natural": PartitionSettings(kind="natural"),
    "linear": PartitionSettings(kind="size", clients=4, growth="linear"),
    "square": PartitionSettings(kind="size", clients=4, growth="square"),
    "exponential": PartitionSettings(kind="size", clients=4, growth="exponential"),
}


def plan(seed: int = 0, **keys: object) -> Plan:
    return make_plan(PartitionSettings.model_validate(keys), LABELS, GROUPS, seed)


def everything(made: Plan) -> np.ndarray:
    return np.concatenate([*made.clients, *made.holdout])


def sizes(made: Plan) -> list[int]:
    return [len(a) + len(b) for a, b in zip(made.clients, made.holdout, strict=True)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_disjoint_and_covers(name: str) -> None:
    """10 classes of 40 examples: every kind here divides them all, so the plan is a permutation of 0..399."""
    made = make_plan(KINDS[name], LABELS, GROUPS, 3)
    assert sorted(everything(made)) == list(range(400))
    for array in (*made.clients, *made.holdout):
        assert array.dtype == np.int64
        assert (np.diff(array) > 0).all()
        assert not array.flags.writeable


@pytest.mark.parametrize("name", KINDS)
def test_holdout_is_the_floor_of_the_share(name: str) -> None:
    """n examples and holdout 0.1: floor(n / 10) for evaluation."""
    made = make_plan(KINDS[name], LABELS, GROUPS, 3)
    assert [len(part) for part in made.holdout] == [size // 10 for size in sizes(made)]


@pytest.mark.parametrize("name", KINDS)
def test_class_counts_count_training_labels(name: str) -> None:
    """Row i, column c: how often class c stands among client i's training labels."""
    made = make_plan(KINDS[name], LABELS, GROUPS, 3)
    expected = [[int((LABELS[part] == c).sum()) for c in range(10)] for part in made.clients]
    assert made.class_counts.tolist() == expected


@pytest.mark.parametrize("name", KINDS)
def test_same_seed_same_plan_another_seed_another(name: str) -> None:
    """The hash covers all indices: equal for equal plans, and the seed moves some index in every kind."""
    first, again, other = (make_plan(KINDS[name], LABELS, GROUPS, seed) for seed in (3, 3, 4))
    assert first.hash == again.hash != other.hash
    for a, b in zip(first.clients, again.clients, strict=True):
        assert np.array_equal(a, b)


def test_a_fresh_process_makes_the_same_plans() -> None:
    """Another process, with another hash seed and another global generator, computes the same hashes."""
    code = """
import json, random, numpy as np
random.seed(99); np.random.seed(99)
from tests.test_partition import GROUPS, KINDS, LABELS
from common.partition import make_plan
print(json.dumps({name: make_plan(kind, LABELS, GROUPS, 5).hash for name, kind in KINDS.items()}))
"""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONHASHSEED": "123", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = {name: make_plan(kind, LABELS, GROUPS, 5).hash for name, kind in KINDS.items()}
    assert json.loads(done.stdout) == expected


def test_planning_leaves_global_generators_alone() -> None:
    """The first plan of a process imports the data set libraries, one of which draws from `random`."""
    code = """
import random, numpy as np, torch
from tests.test_partition import GROUPS, KINDS, LABELS, state
from common.partition import make_plan
before = state()
for kind in KINDS.values():
    make_plan(kind, LABELS, GROUPS, 5)
assert state() == before
"""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)


def state() -> tuple[object, bytes, bytes]:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def test_iid_sizes_differ_by_at_most_one() -> None:
    """400 over 7: one client of 58 and six of 57."""
    assert sorted(sizes(plan(kind="iid", clients=7))) == [57] * 6 + [58]


def test_iid_does_not_follow_the_order_of_the_file() -> None:
    """Labels in sequence: a client of 40 consecutive rows would hold one class, a shuffled one several."""
    made = make_plan(PartitionSettings(clients=10), np.sort(LABELS), None, 0)
    assert ((made.class_counts > 0).sum(axis=1) > 4).all()


def test_ten_clients_by_default() -> None:
    assert len(plan().clients) == 10


def test_sizes_grow_as_they_are_told() -> None:
    """Units 1:2:3:4 of 400, then 1:4:9:16 of 300 with the remainder at the largest."""
    assert sizes(plan(kind="size", clients=4, growth="linear")) == [40, 80, 120, 160]
    made = make_plan(KINDS["square"], LABELS[:300], None, 0)
    assert sizes(made) == [10, 40, 90, 160]


def test_pathological_clients_have_so_many_classes() -> None:
    """Two classes each, without a holdout; 20 clients over 10 classes use every class."""
    made = plan(kind="pathological", clients=20, classes_per_client=2, holdout=0)
    assert ((made.class_counts > 0).sum(axis=1) == 2).all()
    assert (made.class_counts.sum(axis=0) == 40).all()


def test_shards_hold_few_classes_and_equal_sizes() -> None:
    """20 shards of 20 from sorted labels of 40 a class: each shard has one class, each client one or two."""
    made = plan(kind="shards", clients=10, shards_per_client=2, holdout=0)
    assert sizes(made) == [40] * 10
    assert ((made.class_counts > 0).sum(axis=1) <= 2).all()


def test_natural_clients_are_the_sorted_groups() -> None:
    """Groups 3, 5, 7, 11 in this order; the rows of group g are those where GROUPS == g."""
    made = plan(kind="natural", holdout=0)
    for part, group in zip(made.clients, (3, 5, 7, 11), strict=True):
        assert part.tolist() == [i for i, member in enumerate(GROUPS) if member == group]


def test_some_natural_groups_are_chosen_by_the_seed_and_stay_sorted() -> None:
    """Two of four groups: the ids of clients 0 and 1 ascend, and seeds do not all choose the same two."""
    chosen = []
    for seed in range(6):
        made = plan(seed, kind="natural", clients=2, holdout=0)
        ids = [set(GROUPS[part].tolist()) for part in made.clients]
        assert all(len(group) == 1 for group in ids)
        chosen.append(tuple(group.pop() for group in ids))
    assert all(a < b for a, b in chosen)
    assert len(set(chosen)) > 1


def test_groups_may_be_text() -> None:
    """Sorted as text: 'ann' before 'bob'."""
    names = np.array(["bob", "ann"])[np.arange(400) % 2]
    made = make_plan(PartitionSettings(kind="natural", holdout=0), LABELS, names, 0)
    assert np.array_equal(made.clients[0], np.flatnonzero(names == "ann"))


def test_empty_clients_where_the_settings_allow_them() -> None:
    """alpha = 0.01 puts each of 10 classes on about one client, so 50 clients cannot all have examples."""
    made = plan(kind="dirichlet", clients=50, alpha=0.01, min_examples=0)
    assert min(sizes(made)) == 0
    assert sorted(everything(made)) == list(range(400))


def test_a_client_of_one_example_trains_on_it() -> None:
    """As many clients as examples: every client has one, and none is left for evaluation."""
    made = make_plan(PartitionSettings(clients=20, holdout=0.9), LABELS[:20], None, 0)
    assert [len(part) for part in made.clients] == [1] * 20
    assert [len(part) for part in made.holdout] == [0] * 20


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "iid", "clients": 401}, ["partition.clients = 401", "400 examples"]),
        ({"kind": "natural", "clients": 5}, ["partition.clients = 5", "4 groups"]),
        (
            {"kind": "dirichlet", "clients": 100, "alpha": 0.01},
            ["partition.alpha = 0.01", "partition.clients = 100", "partition.min_examples = 1"],
        ),
        (
            {"kind": "dirichlet", "clients": 10, "min_examples": 41},
            ["partition.alpha = 0.5", "partition.clients = 10", "partition.min_examples = 41"],
        ),
        ({"kind": "iid", "clients": 10, "min_examples": 41}, ["min_examples = 41", "clients = 10", "of 40"]),
        ({"kind": "pathological", "classes_per_client": 11}, ["classes_per_client = 11", "10 classes"]),
        (
            {"kind": "pathological", "clients": 400, "classes_per_client": 5},
            ["partition.classes_per_client = 5", "partition.clients = 400"],
        ),
        (
            {"kind": "shards", "clients": 300, "shards_per_client": 2},
            ["partition.shards_per_client = 2", "partition.clients = 300", "600 shards"],
        ),
        (
            {"kind": "size", "clients": 40, "growth": "exponential"},
            ["partition.growth = 'exponential'", "partition.clients = 40", "linear"],
        ),
        (
            {"kind": "size", "clients": 400, "growth": "exponential"},
            ["partition.growth = 'exponential'", "partition.clients = 400"],
        ),
    ],
)
def test_impossible_settings_are_named(keys: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(**keys)
    for word in words:
        assert word in str(caught.value)


def test_natural_needs_groups() -> None:
    with pytest.raises(SettingsError, match=r"kind = 'natural' needs a group .* allowed without groups: iid"):
        make_plan(PartitionSettings(kind="natural"), LABELS, None, 0)


@pytest.mark.parametrize(
    ("labels", "groups", "words"),
    [
        (LABELS.astype(float), None, "labels must be integers"),
        (LABELS - 1, None, "smallest is -1"),
        (LABELS.reshape(2, 200), None, r"not int64 \(2, 200\)"),
        (LABELS, GROUPS[:-1], r"groups must be .*\(399,\)"),
        (LABELS, GROUPS.astype(float), "groups must be .* float64"),
        (LABELS[:0], GROUPS[:0], "only 0 groups"),
    ],
)
def test_bad_columns_are_refused(labels: np.ndarray, groups: np.ndarray | None, words: str) -> None:
    kind = "iid" if groups is None else "natural"
    with pytest.raises(SettingsError, match=words):
        make_plan(PartitionSettings(kind=kind), labels, groups, 0)


@given(st.integers(0, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 2**40))
def test_any_holdout_splits_in_two(size: int, share: float, seed: int) -> None:
    """Train and evaluation are a partition of the indices, sorted; a client with examples trains on one."""
    indices = np.arange(size) * 3
    train, evaluate = split_holdout(indices, share, seed, "site")
    assert sorted([*train, *evaluate]) == indices.tolist()
    assert (np.diff(train) > 0).all()
    assert (np.diff(evaluate) > 0).all()
    assert len(train) >= min(size, 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["iid", "dirichlet", "shards"]),
    st.integers(1, 8),
    st.lists(st.integers(0, 3), min_size=20, max_size=60),
    st.integers(0, 2**40),
)
def test_any_plan_uses_an_example_at_most_once(kind: str, clients: int, labels: list[int], seed: int) -> None:
    """No index twice, none outside the data; iid and Dirichlet lose none."""
    keys = {"kind": kind, "clients": clients, "min_examples": 0}
    made = make_plan(PartitionSettings.model_validate(keys), np.array(labels), None, seed)
    indices = everything(made)
    assert len(made.clients) == len(made.holdout) == clients
    assert len(set(indices.tolist())) == len(indices)
    assert set(indices.tolist()) <= set(range(len(labels)))
    assert kind == "shards" or len(indices) == len(labels)


@pytest.mark.data
def test_writers_of_mnist_are_the_clients() -> None:
    """60,000 training digits of 539 writers: client i has exactly the digits of the i-th writer id."""
    if "FEDKEEL_DATA" not in os.environ:
        pytest.skip("FEDKEEL_DATA is not set: no folder with real data")
    with np.load(Path(os.environ["FEDKEEL_DATA"]) / "mnist_writers" / "mnist_writers.npz") as file:
        labels, writers = file["y_train"], file["writer_train"]
    made = make_plan(PartitionSettings(kind="natural", holdout=0.2), labels, writers, 0)
    assert len(made.clients) == 539
    for writer, train, evaluate in zip(np.unique(writers), made.clients, made.holdout, strict=True):
        assert np.array_equal(np.sort([*train, *evaluate]), np.flatnonzero(writers == writer))


def test_shared_splits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered split is bit-equal to a fresh one, is used at all, and damage to its file only costs time."""
    settings = PartitionSettings(kind="dirichlet", clients=5, alpha=0.3)
    labels = np.arange(200) % 7
    fresh = make_plan(settings, labels, None, 3)
    monkeypatch.setenv("FEDKEEL_PLANS", str(tmp_path))
    assert make_plan(settings, labels, None, 3).hash == fresh.hash
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as context:
        context.setattr("common.partition.split", None)
        assert make_plan(settings, labels, None, 3).hash == fresh.hash
        with pytest.raises(TypeError):
            make_plan(settings, labels, None, 4)
    file.write_bytes(file.read_bytes()[:100])
    assert make_plan(settings, labels, None, 3).hash == fresh.hash
