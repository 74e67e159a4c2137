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
from common.experiment import Experiment, PartitionSettings
from common.flower import ROOT
from common.partition.assignment import Assignment, split_holdout
from common.partition.make import make_assignment

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
    "quantity": PartitionSettings(kind="quantity", clients=4, alpha=2.0),
    "balanced": PartitionSettings(kind="dirichlet", clients=7, alpha=1.0, balanced=True),
    "cycled": PartitionSettings(kind="pathological", clients=20, classes_per_client=[1, 3]),
    "ranged": PartitionSettings(kind="pathological", clients=20, classes_per_client="1-4"),
}


def plan(seed: int = 0, **keys: object) -> Assignment:
    return make_assignment(PartitionSettings.model_validate(keys), LABELS, GROUPS, seed)


def everything(made: Assignment) -> np.ndarray:
    return np.concatenate([*made.clients, *made.holdout])


def sizes(made: Assignment) -> list[int]:
    return [len(a) + len(b) for a, b in zip(made.clients, made.holdout, strict=True)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_disjoint_and_covers(name: str) -> None:
    """10 classes of 40 examples: every kind here divides them all, so the plan is a permutation of 0..399."""
    made = make_assignment(KINDS[name], LABELS, GROUPS, 3)
    assert sorted(everything(made)) == list(range(400))
    for array in (*made.clients, *made.holdout):
        assert array.dtype == np.int64
        assert (np.diff(array) > 0).all()
        assert not array.flags.writeable


@pytest.mark.parametrize("name", KINDS)
def test_holdout_is_the_floor_of_the_share(name: str) -> None:
    """n examples and holdout 0.1: floor(n / 10) for evaluation."""
    made = make_assignment(KINDS[name], LABELS, GROUPS, 3)
    assert [len(part) for part in made.holdout] == [size // 10 for size in sizes(made)]


@pytest.mark.parametrize("name", KINDS)
def test_class_counts_count_training_labels(name: str) -> None:
    """Row i, column c: how often class c stands among client i's training labels."""
    made = make_assignment(KINDS[name], LABELS, GROUPS, 3)
    expected = [[int((LABELS[part] == c).sum()) for c in range(10)] for part in made.clients]
    assert made.class_counts.tolist() == expected


@pytest.mark.parametrize("name", KINDS)
def test_same_seed_same_plan_another_seed_another(name: str) -> None:
    """The hash covers all indices: equal for equal plans, and the seed moves some index in every kind."""
    first, again, other = (make_assignment(KINDS[name], LABELS, GROUPS, seed) for seed in (3, 3, 4))
    assert first.hash == again.hash != other.hash
    for a, b in zip(first.clients, again.clients, strict=True):
        assert np.array_equal(a, b)


def test_a_fresh_process_makes_the_same_plans() -> None:
    """Another process, with another hash seed and another global generator, computes the same hashes."""
    code = """
import json, random, numpy as np
random.seed(99); np.random.seed(99)
from tests.common.test_partition import GROUPS, KINDS, LABELS
from common.partition.make import make_assignment
print(json.dumps({name: make_assignment(kind, LABELS, GROUPS, 5).hash for name, kind in KINDS.items()}))
"""
    root = ROOT
    environment = os.environ | {"PYTHONHASHSEED": "123", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = {name: make_assignment(kind, LABELS, GROUPS, 5).hash for name, kind in KINDS.items()}
    assert json.loads(done.stdout) == expected


def test_planning_leaves_global_generators_alone() -> None:
    """The first plan of a process imports the data set libraries, one of which draws from `random`."""
    code = """
import random, numpy as np, torch
from tests.common.test_partition import GROUPS, KINDS, LABELS, state
from common.partition.make import make_assignment
before = state()
for kind in KINDS.values():
    make_assignment(kind, LABELS, GROUPS, 5)
assert state() == before
"""
    root = ROOT
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)


def state() -> tuple[object, bytes, bytes]:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def test_iid_sizes_differ_by_at_most_one() -> None:
    """400 over 7: one client of 58 and six of 57."""
    assert sorted(sizes(plan(kind="iid", clients=7))) == [57] * 6 + [58]


def test_iid_does_not_follow_the_order_of_the_file() -> None:
    """Labels in sequence: a client of 40 consecutive rows would hold one class, a shuffled one several."""
    made = make_assignment(PartitionSettings(clients=10), np.sort(LABELS), None, 0)
    assert ((made.class_counts > 0).sum(axis=1) > 4).all()


def test_ten_clients_by_default() -> None:
    assert len(plan().clients) == 10


def test_sizes_grow_as_they_are_told() -> None:
    """Units 1:2:3:4 of 400, then 1:4:9:16 of 300 with the remainder at the largest."""
    assert sizes(plan(kind="size", clients=4, growth="linear")) == [40, 80, 120, 160]
    made = make_assignment(KINDS["square"], LABELS[:300], None, 0)
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
    made = make_assignment(PartitionSettings(kind="natural", holdout=0), LABELS, names, 0)
    assert np.array_equal(made.clients[0], np.flatnonzero(names == "ann"))


def test_empty_clients_where_the_settings_allow_them() -> None:
    """alpha = 0.01 puts each of 10 classes on about one client, so 50 clients cannot all have examples."""
    made = plan(kind="dirichlet", clients=50, alpha=0.01, min_examples=0)
    assert min(sizes(made)) == 0
    assert sorted(everything(made)) == list(range(400))


def test_a_client_of_one_example_trains_on_it() -> None:
    """As many clients as examples: every client has one, and none is left for evaluation."""
    made = make_assignment(PartitionSettings(clients=20, holdout=0.9), LABELS[:20], None, 0)
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
        make_assignment(PartitionSettings(kind="natural"), LABELS, None, 0)


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
        make_assignment(PartitionSettings(kind=kind), labels, groups, 0)


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
    made = make_assignment(PartitionSettings.model_validate(keys), np.array(labels), None, seed)
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
    made = make_assignment(PartitionSettings(kind="natural", holdout=0.2), labels, writers, 0)
    assert len(made.clients) == 539
    for writer, train, evaluate in zip(np.unique(writers), made.clients, made.holdout, strict=True):
        assert np.array_equal(np.sort([*train, *evaluate]), np.flatnonzero(writers == writer))


def test_shared_splits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered split is bit-equal to a fresh one, is used at all, and damage to its file only costs time."""
    settings = PartitionSettings(kind="dirichlet", clients=5, alpha=0.3)
    labels = np.arange(200) % 7
    fresh = make_assignment(settings, labels, None, 3)
    monkeypatch.setenv("FEDKEEL_PLANS", str(tmp_path))
    assert make_assignment(settings, labels, None, 3).hash == fresh.hash
    (file,) = tmp_path.glob("*.npz")
    with monkeypatch.context() as context:
        context.setattr("common.partition.make.split", None)
        assert make_assignment(settings, labels, None, 3).hash == fresh.hash
        with pytest.raises(TypeError):
            make_assignment(settings, labels, None, 4)
    file.write_bytes(file.read_bytes()[:100])
    assert make_assignment(settings, labels, None, 3).hash == fresh.hash


def test_a_split_made_apart_loads_nothing_here_and_is_made_once(tmp_path: Path) -> None:
    """Four processes ask at once, as many clients of one machine do: one makes it, none holds the library."""
    code = (
        "import sys, numpy as np\n"
        "from common.experiment import PartitionSettings\n"
        "from pathlib import Path\n"
        "from common.partition.make import make_assignment\n"
        "from common.partition.split_cache import share_in\n"
        "share_in(Path(sys.argv[1]))\n"
        "settings = PartitionSettings(kind='dirichlet', clients=5, alpha=0.3)\n"
        "made = make_assignment(settings, np.arange(200) % 7, None, 3)\n"
        "print(made.hash, 'datasets' in sys.modules, 'pandas' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("FEDKEEL_PLANS", None)
    asked = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    said = {each.communicate(timeout=120)[0] for each in asked}
    fresh = make_assignment(PartitionSettings(kind="dirichlet", clients=5, alpha=0.3), np.arange(200) % 7, None, 3)
    assert said == {f"{fresh.hash} False False\n"}
    assert len(list(tmp_path.glob("*.npz"))) == 1


def test_what_cannot_be_split_is_told_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that fails says nothing; this one does."""
    monkeypatch.setenv("FEDKEEL_PLANS", str(tmp_path))
    monkeypatch.setattr("common.partition.split_cache._resident", True)
    settings = PartitionSettings(kind="dirichlet", clients=50, alpha=0.01, min_examples=4)
    with pytest.raises(SettingsError, match="no draw gave each client"):
        make_assignment(settings, np.arange(200) % 7, None, 3)


PINNED = {
    "iid": "7f051529e4a86a960583e6ea544312de7efc2a5f9e8d9c98a4fbb04ed375c614",
    "dirichlet": "f23cbabf711330d71bd550bfc81e1bf7a2c30d371ba851294972caa8637e04bc",
    "pathological": "223935ef6f52bf6ea88d4954f1142b7a5cc7803bd6a1b9ea57fd4d3466d2cf73",
    "shards": "f35e53ce1626db566dd922f3603ee5fef130861db805bfb0e065b736df278df9",
    "natural": "62886cd0a6b7ee517646aab5f03eea13260a9d11c560b28699852edb0e341109",
    "linear": "262e527d59f6e57b2cf81348376617be27596abd68e668b76e67c5998dfc04e4",
    "square": "bb4d118ab9909badb507e023bffd7603f2fd90fd74df2f3038b65462473f4b2a",
    "exponential": "2253a5fa11628394f07c59f566a7719169f7e06e2cb0c2bfbd820bb8ebfab80e",
    "quantity": "4ad5239aa73a100466c90f0a2f364062b52380c68492f6e60bd1e7cfe1ca8742",
    "balanced": "09e1dc1741aba2bdd964fee34a0bbb57f1179bccf5c0b1f0cb431378257071d1",
    "cycled": "3947942d24558ead0b73decd9e4d2dbd766a15292afb217ee04ed52c98ec3606",
    "ranged": "1c0db1ff3976c410f109eace09b5c8bd8c00f29ea0f9af93a523c8131d70a3f2",
}
"""Plans of seed 5, as they were when their kind came: a split that changes changes every result that rests on it."""


@pytest.mark.parametrize("name", KINDS)
def test_splits_stay_what_they_are(name: str) -> None:
    assert make_assignment(KINDS[name], LABELS, GROUPS, 5).hash == PINNED[name]


def test_quantity_skew_is_of_sizes_alone() -> None:
    """Sizes of Dirichlet(0.3) differ much, label mixes as little as iid ones: over half of 10,000 examples, the share
    of each of 10 classes is 0.1 with a deviation of sqrt(0.09 / n) < 0.005, six of which are 0.03."""
    labels = np.arange(20_000) % 10
    settings = PartitionSettings(kind="quantity", clients=5, alpha=0.3, holdout=0, min_examples=0)
    made = make_assignment(settings, labels, None, 1)
    held = sizes(made)
    assert sum(held) == 20_000
    assert max(held) > 10_000
    assert max(held) > 5 * min(held)
    largest = made.class_counts[int(np.argmax(held))]
    assert np.abs(largest / largest.sum() - 0.1).max() < 0.03


def test_quantity_skew_follows_alpha() -> None:
    """Dirichlet(a) over k clients: a share's variance is (k - 1) / (k^2 (k a + 1)), so that the sizes' deviation over
    their mean is sqrt((k - 1) / (k a + 1)): 0.30 for k = 10, a = 10 and 2.1 for a = 0.1; the mean of 40 draws."""

    def spread(alpha: float) -> float:
        settings = PartitionSettings(kind="quantity", clients=10, alpha=alpha, holdout=0, min_examples=0)
        held = [np.array(sizes(make_assignment(settings, LABELS, None, seed))) for seed in range(40)]
        return float(np.sqrt(np.mean([h.var() / h.mean() ** 2 for h in held])))

    assert spread(10) == pytest.approx(np.sqrt(9 / 101), rel=0.15)
    assert spread(0.1) == pytest.approx(np.sqrt(9 / 2), rel=0.15)


def test_quantity_skew_leaves_clients_empty_where_it_may() -> None:
    """A hundredth of 400 examples is 4: shares of Dirichlet(0.05) are mostly below a four-hundredth."""
    keys = {"kind": "quantity", "clients": 100, "alpha": 0.05}
    assert min(sizes(plan(**keys, min_examples=0))) == 0
    with pytest.raises(SettingsError, match=r"partition.alpha = 0.05 .* partition.min_examples = 1"):
        plan(**keys)


def test_classes_per_client_as_a_list_are_cycled() -> None:
    """[1, 3]: clients hold 1, 3, 1, 3, ... classes, client i surely class i mod 10; all 400 examples are used."""
    made = plan(kind="pathological", clients=20, classes_per_client=[1, 3], holdout=0)
    assert (made.class_counts > 0).sum(axis=1).tolist() == [1, 3] * 10
    assert all(made.class_counts[i, i % 10] for i in range(20))
    assert made.class_counts.sum(axis=0).tolist() == [40] * 10


def test_a_class_is_divided_evenly_among_its_holders() -> None:
    """Two clients of all ten classes and ten of one: each class of 40 has three holders, 14 + 13 + 13."""
    made = plan(kind="pathological", clients=12, classes_per_client=[1] * 10 + [10, 10], holdout=0)
    for column in made.class_counts.T:
        assert sorted(column[column > 0]) == [13, 13, 14]


def test_classes_per_client_as_a_range_are_drawn() -> None:
    """'1-4': every number occurs among 40 clients, none beyond, and another seed draws others."""
    first, second = (
        plan(seed, kind="pathological", clients=40, classes_per_client="1-4", holdout=0) for seed in (0, 1)
    )
    counts = (first.class_counts > 0).sum(axis=1)
    assert set(counts) == {1, 2, 3, 4}
    assert counts.tolist() != (second.class_counts > 0).sum(axis=1).tolist()


@pytest.mark.parametrize("same", [[2], [2, 2], "2-2"])
def test_equal_class_counts_are_the_number(same: object) -> None:
    """However they are written, the plan is that of `classes_per_client = 2`."""
    number = plan(kind="pathological", clients=20, classes_per_client=2)
    assert plan(kind="pathological", clients=20, classes_per_client=same).hash == number.hash


def test_balanced_clients_differ_in_labels_alone() -> None:
    """400 over 7: sizes 58, 57, ... 57, and mixes that a Dirichlet(0.1) makes unequal: some class is over half."""
    made = plan(kind="dirichlet", clients=7, alpha=0.1, balanced=True, holdout=0)
    assert sizes(made) == [58] + [57] * 6
    assert (made.class_counts.max(axis=1) > 0.4 * made.class_counts.sum(axis=1)).sum() > 3


def test_balanced_takes_labels_with_gaps() -> None:
    """Classes 0, 3 and 9 only."""
    labels = np.array([0, 3, 9])[np.arange(90) % 3]
    made = make_assignment(PartitionSettings(kind="dirichlet", balanced=True, clients=4), labels, None, 0)
    assert sorted(everything(made)) == list(range(90))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("classes_per_client = 0", ["partition.classes_per_client = 0", "a number from 1"]),
        ("classes_per_client = [1, 0]", ["partition.classes_per_client = [1, 0]", "list"]),
        ("classes_per_client = []", ["partition.classes_per_client = []"]),
        ("classes_per_client = true", ["partition.classes_per_client = True"]),
        ('classes_per_client = "4-1"', ["partition.classes_per_client = '4-1'", "'1-4'"]),
        ("balanced = true", ["balanced belongs to kind 'dirichlet', not to 'iid'"]),
        ('kind = "file"', ["kind = 'file' and file"]),
        ('file = "a.json"', ["kind = 'file' and file"]),
        ('shift = "blur"', ["partition.shift = 'blur'", "'noise'"]),
        ('shift = "contrast"\nshift_strength = 2.0', ["shift_strength = 2.0", "up to 1"]),
    ],
)
def test_wrong_settings_are_named(line: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        Experiment.parse(f"[partition]\n{line}")
    for word in words:
        assert word in str(caught.value)
