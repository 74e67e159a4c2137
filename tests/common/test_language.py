"""GPT-2 in federations: a tiny one with random weights, all of it or LoRA adapters, in every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from client.app import app
from common import tasks
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.model import build, matrix_slots
from common.tasks.text import Text
from server.app import run
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.common.test_tables import jsonl
from tests.support.today import cells

transformers = pytest.importorskip("transformers", reason="needs the extra `text`")
pytest.importorskip("peft", reason="needs the extra `text`")

TINY = {"model": "gpt2", "width": 8, "layers": 2, "heads": 2, "length": 12}
LORA = {**TINY, "lora_rank": 2, "lora_dropout": 0.1}
ROWS = [{"text": "good" if i % 2 else "no way", "label": i % 2} for i in range(40)]


def create(folder: Path, seed: int = 0, **options: Any) -> Text:
    file = str(jsonl(folder / "train.jsonl", ROWS))
    task = tasks.create(TaskSettings(name="text", file=file, **options), PartitionSettings(clients=2), seed)
    assert isinstance(task, Text)
    return task


def experiment(folder: Path, model: dict[str, Any], **given: Any) -> Experiment:
    """Three clients of the table above for two rounds."""
    values: dict[str, Any] = {
        "name": "language",
        "rounds": 2,
        "task": {"name": "text", "file": str(jsonl(folder / "train.jsonl", ROWS)), **model},
        "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3},
        "local": {"optimizer": "adamw", "lr": 0.01, "batch_size": 8},
        **given,
    }
    return Experiment.model_validate(values)


def trainable(folder: Path, **options: Any) -> dict[str, tuple[int, ...]]:
    task = create(folder, **options)
    return {name: slot.shape for name, slot in build(task, 0).layout.items()}


def test_parameters_of_gpt2(tmp_path: Path) -> None:
    """257 tokens and 12 places of width 8; a block: two norms (2 * 16), attention (8*24 + 24 + 8*8 + 8), mlp
    (8*32 + 32 + 32*8 + 8); a last norm and 8 * 2 of the output layer."""
    block = 2 * 16 + (8 * 24 + 24 + 8 * 8 + 8) + (8 * 32 + 32 + 32 * 8 + 8)
    model = build(create(tmp_path, **TINY), 0)
    assert len(model.vector) == 257 * 8 + 12 * 8 + 2 * block + 16 + 16
    assert "score.weight" in model.layout


def test_adapters_and_output_layer_alone_are_trainable(tmp_path: Path) -> None:
    """Of rank 2 on c_attn (8 -> 24): A (2, 8) and B (24, 2) in each of 2 blocks, and the output layer (2, 8): 144."""
    shapes = trainable(tmp_path, **LORA)
    assert sorted(shapes.values()) == [(2, 8), (2, 8), (2, 8), (24, 2), (24, 2)]
    assert sum(a * b for a, b in shapes.values()) == 2 * (16 + 48) + 16 == 144
    more = trainable(tmp_path, **LORA, lora_targets=["c_attn", "mlp.c_proj"])
    assert sum(a * b for a, b in more.values()) == 144 + 2 * (2 * 32 + 8 * 2)


def test_matrices_are_adapters_and_blocks(tmp_path: Path) -> None:
    """Muon and SOAP see A and B, of the whole model each block's four weights; embeddings and output layer never."""
    for options, shapes in (
        (LORA, [(2, 8), (24, 2)] * 2),
        (TINY, [(8, 24), (8, 8), (8, 32), (32, 8)] * 2),
    ):
        task = create(tmp_path, **options)
        assert [slot.shape for slot in matrix_slots(task, build(task, 0), "all")] == shapes


def test_the_frozen_weights_are_in_the_layout_hash(tmp_path: Path) -> None:
    """Two seeds: other frozen weights under the same adapters. A site with another base would be refused."""
    task = create(tmp_path, **LORA)
    one, other = build(task, 0), build(task, 1)
    assert one.layout == other.layout
    assert one.layout_hash == build(task, 0).layout_hash != other.layout_hash
    whole = create(tmp_path, **TINY)
    assert build(whole, 0).layout_hash == build(whole, 1).layout_hash


def test_adapters_begin_as_nothing(tmp_path: Path) -> None:
    """B = 0: the logits are those of the base model, for any text."""
    task = create(tmp_path, **LORA)
    model = build(task, 0).module.eval()
    tokens = task.features(task.pool().inputs[:4])
    before = model(tokens)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.fill_(3.0)
    torch.testing.assert_close(model(tokens), before)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(3.0)
    assert not torch.allclose(model(tokens), before)


def test_logits_are_those_of_the_library(tmp_path: Path) -> None:
    """`GPT2ForSequenceClassification` with the same weights, under the same names, and a padding token of its own;
    texts of unequal length, in any batch, cut or not."""
    task = create(tmp_path, **TINY)
    model = build(task, 0).module.eval()
    config = transformers.GPT2Config(
        vocab_size=258,
        n_positions=12,
        n_embd=8,
        n_layer=2,
        n_head=2,
        num_labels=2,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
    )
    theirs = transformers.GPT2ForSequenceClassification(config).eval()
    weights = model.state_dict()
    name = "transformer.wte.weight"
    theirs.load_state_dict({**weights, name: torch.cat([weights[name], torch.zeros(1, 8)])})
    tokens = task.pool().inputs[:5].long()
    mask = tokens >= 0
    want = theirs(input_ids=tokens.where(mask, 257), attention_mask=mask.long()).logits
    torch.testing.assert_close(model(tokens), want)
    torch.testing.assert_close(model(task.features(tokens)), want)
    torch.testing.assert_close(model(task.features(tokens[1:2])), want[1:2])
    seen: list[torch.Tensor] = []
    layer = task.output_layer(model)
    assert layer is not None
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens)
    assert seen[0].shape == (5, 8)


@pytest.mark.parametrize("model", [TINY, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gpt2_learns_and_resumes(model: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    """FA-GC with dropout: three rounds at once, or two and one more after a restart, end in the same weights; only
    what is trainable crosses the wire."""
    local = {"optimizer": optimizer, "lr": 0.01, "batch_size": 8}
    given = {"local": local, "strategy": {"name": "fagc"}}
    whole = run(InProcessGrid(app), experiment(tmp_path, model, **given, rounds=3), RunFolder(tmp_path / "whole"))
    memory = str(tmp_path / "memory")
    folder = RunFolder(tmp_path / "parts")
    run(InProcessGrid(app, memory=memory), experiment(tmp_path, model, **given, rounds=2), folder)
    again = InProcessGrid(app, memory=memory)
    resumed = run(again, experiment(tmp_path, model, **given, rounds=3), folder, resume=True)
    assert resumed["sha256"] == whole["sha256"]
    assert whole["dropped"] == {}
    first, last = (RunFolder(tmp_path / "whole").history()[i]["train"]["loss"]["weighted"] for i in (0, -1))
    assert last < first


def test_only_adapters_travel(tmp_path: Path) -> None:
    """144 numbers of 4 bytes to and from each of 3 clients, the rest is heads of messages; the whole model is 3,920."""
    sent = {}
    for name, model in (("lora", LORA), ("whole", TINY)):
        settings = experiment(tmp_path, model, rounds=1)
        record = run(InProcessGrid(app), settings, RunFolder(tmp_path / name))
        sent[name] = (record["bytes_down"], record["bytes_up"])
    numbers = len(build(create(tmp_path, **TINY), 0).vector) - 144
    for lora, whole in zip(sent["lora"], sent["whole"], strict=True):
        assert whole - lora == pytest.approx(3 * 4 * numbers, rel=0.01)
        assert lora < 3 * (4 * 144 + 3000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", cells([(o, m) for o in ("adamw", "muon") for m in ("whole", "lora")], 1, 4, "language", name="-".join)
)
def test_workers_find_the_same_weights(cell: tuple[str, str], tmp_path: Path) -> None:
    """Dropout and the random adapters are functions of the seed, in every process. The model loads into a new one."""
    optimizer, model = cell[0], {"whole": TINY, "lora": LORA}[cell[1]]
    settings = experiment(tmp_path, model, local={"optimizer": optimizer, "lr": 0.01, "batch_size": 8})
    here = run(InProcessGrid(app), settings, RunFolder(tmp_path / "here"))
    with grid("client.app:app", 2) as workers:
        there = run(workers, settings, RunFolder(tmp_path / "there"))
    assert there["sha256"] == here["sha256"]
    assert here["dropped"] == {}
    fresh = create(tmp_path, **model).model()
    fresh.load_state_dict(load_file(tmp_path / "here" / "model.safetensors"))


# --- pretrained weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny GPT-2 as `transformers` saves it, its tokenizer of two words beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path / "base"
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=4, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=3, eos_token_id=3
    )
    transformers.GPT2Model(config).save_pretrained(path)
    vocabulary = {"good": 0, "way": 1, "<unk>": 2, "<end>": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    kinds = {"unk_token": "<unk>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **kinds).save_pretrained(path)
    return path


def test_a_folder_of_pretrained_weights(tmp_path: Path, folder: Path) -> None:
    """Its weights, its tokens, and an output layer that the seed draws."""
    options = {"model": "gpt2", "length": 12, "pretrained": str(folder), "lora_rank": 2}
    task = create(tmp_path, **options)
    assert task.pool().inputs[:2, :3].tolist() == [[2, 1, -1], [0, -1, -1]]
    one, same, other = build(task, 0), build(task, 0), build(task, 1)
    saved = load_file(folder / "model.safetensors")
    base = "transformer.h.0.attn.c_attn.base_layer.weight"
    torch.testing.assert_close(one.module.state_dict()[base], saved["h.0.attn.c_attn.weight"])
    assert torch.equal(one.vector, same.vector)
    assert not torch.equal(one.vector, other.vector)
    assert one.layout_hash == other.layout_hash
    record = run(InProcessGrid(app), experiment(tmp_path, options), RunFolder(tmp_path / "run"))
    assert record["dropped"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt2", "width": 9, "heads": 2}, "width = 9 is no multiple of heads = 2"),
        ({"model": "gpt2", "lora_alpha": 8}, "lora_alpha without lora_rank > 0"),
        (
            {**TINY, "lora_rank": 2, "lora_targets": ["wte"]},
            "lora_targets: 'wte' is no layer of gpt2; allowed: c_a",
        ),
        ({"model": "gpt2", "vocabulary": 9}, "vocabulary belongs to model 'bag' and 'lstm', not to 'gpt2'"),
        ({"model": "gpt2", "pretrained": "x", "width": 8}, "width beside pretrained, which has its own"),
        ({"model": "bag", "lora_rank": 2}, "lora_rank belongs to model 'gpt2', not to 'bag'"),
    ],
)
def test_settings_without_meaning_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        create(tmp_path, **options)


def test_weights_that_cannot_be_used_are_named(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too short, of another kind, not safetensors, absent: each says so, and nothing is unpickled or downloaded."""
    monkeypatch.setattr("common.models.transformer.reachable", lambda: False)
    given = {"model": "gpt2", "pretrained": str(folder)}
    with pytest.raises(SettingsError, match=r"it reads 12 tokens, task.length = 13 is more"):
        create(tmp_path, **given, length=13).names()
    with pytest.raises(SettingsError, match=r"'nobody/nothing' cannot be loaded from the hub or its cache, and is"):
        create(tmp_path, model="gpt2", pretrained="nobody/nothing").names()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SettingsError, match=r"base' cannot be loaded from that folder: .*safetensors"):
        build(create(tmp_path, **given, length=12), 0)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"model_type": "gpt2"', '"model_type": "bert"'))
    with pytest.raises(SettingsError, match=r"base': a model of type 'bert'; allowed: 'gpt2'"):
        create(tmp_path, **given, length=12).names()
