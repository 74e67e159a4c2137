"""Causal language models: windows of texts, splits without a shared token, perplexity, models, sites, engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from client.app import app
from common import tasks
from common.data.documents import Documents, apart, windows
from common.data.hub import read_corpus
from common.data.speeches import LETTERS, roles
from common.data.tokens import utf8
from common.errors import SettingsError
from common.experiment import EvaluateSettings, Experiment, PartitionSettings, TaskSettings
from common.model import build
from common.tasks.causal import CausalLM
from common.tasks.scoring import Scoring
from common.tasks.shakespeare import CORPUS
from server.app import run
from server.engines import vce
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.common.test_tables import jsonl
from tests.support.grpc_sites import over_grpc
from tests.support.site_grid import SiteGrid

pytest.importorskip("transformers", reason="needs the extra `text`")
pytest.importorskip("peft", reason="needs the extra `text`")

TINY = {"width": 16, "layers": 1, "heads": 2, "length": 16}
TEXT = "".join(f"Line {i}: the cat sat on the mat, and the dog sat on the log.\n\n" for i in range(40))


def text_file(folder: Path, text: str = TEXT, name: str = "own.txt") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def create(partition: dict[str, Any] | None = None, **options: Any) -> CausalLM:
    settings = PartitionSettings.model_validate(partition or {"clients": 2})
    task = tasks.create(TaskSettings(name="causal-lm", **{**TINY, **options}), settings, 0)
    assert isinstance(task, CausalLM)
    return task


def experiment(**given: Any) -> Experiment:
    values: dict[str, Any] = {"name": "causal", "rounds": 2, "partition": {"clients": 3, "holdout": 0.2}}
    values["local"] = {"optimizer": "adamw", "lr": 0.01, "batch_size": 8}
    values["round"] = {"wait_for": 3, "deadline_s": 120.0}
    task = {"name": "causal-lm", **TINY, **given.pop("task", {})}
    return Experiment.model_validate({**values, "task": task, **given})


# --- windows


@pytest.mark.parametrize(
    ("text", "stride", "want"),
    [
        ("abcdefgh", 4, ["abcd", "efgh"]),
        ("abcdefg", 4, ["abcd", "efg|"]),
        ("abcde", 4, ["abcd"]),  # of one letter nothing can be told
        ("abcdef", 2, ["abcd", "cdef"]),
        ("abcdefg", 2, ["abcd", "cdef", "efg|"]),
        ("ab", 1, ["ab||"]),
        ("a", 4, []),
    ],
)
def test_windows_of_a_stream(text: str, stride: int, want: list[str]) -> None:
    held = windows(Documents([text], None), utf8(), 3, stride)
    rows = ["".join("|" if t < 0 else chr(t) for t in row) for row in held.tokens.tolist()]
    assert rows == want
    assert held.sizes.tolist() == [len(row.rstrip("|")) for row in want]


def test_windows_stay_in_their_group() -> None:
    """Texts of a group follow one another, each with the end-of-text token behind it."""
    held = windows(Documents(["ab", "xyz", "cd"], np.array(["one", "two", "one"])), utf8(), 9, 10)
    assert held.tokens[:, :6].tolist() == [[97, 98, 256, 99, 100, 256], [120, 121, 122, 256, -1, -1]]
    assert held.groups is not None
    assert held.groups.tolist() == ["one", "two"]
    assert held.starts.tolist() == [0, 6]


@pytest.mark.parametrize("stride", [1, 8, 16, 17])
@pytest.mark.parametrize("kind", ["iid", "quantity", "size", "natural"])
def test_nobody_trains_on_a_token_that_is_evaluated(tmp_path: Path, kind: str, stride: int) -> None:
    """Of any client's: places of the text, of all training and all evaluation windows, are apart."""
    rows = [{"text": f"{i} and {i * i} are numbers; " * 9, "author": "ab"[i % 2]} for i in range(8)]
    task = create(
        {"kind": kind, "clients": 2, "holdout": 0.3}, file=str(jsonl(tmp_path / "a.jsonl", rows)), stride=stride
    )
    held = task._pooled

    def places(parts: Any) -> set[int]:
        every = np.concatenate(parts)
        return {p for i in every for p in range(held.starts[i], held.starts[i] + held.sizes[i])}

    plan = task.assignment
    assert not places(plan.clients) & places(plan.holdout)
    assert all(len(part) for part in plan.clients)
    assert any(len(part) for part in plan.holdout)
    if kind == "natural":
        assert {len(set(task.groups()[part])) for part in plan.clients} == {1}  # type: ignore[index]


def test_a_part_that_could_not_train_evaluates_nothing() -> None:
    starts, sizes = np.array([0, 1, 20]), np.array([4, 4, 4])
    (one,) = apart([np.array([0, 1])], 0.5, starts, sizes) or []
    assert [part.tolist() for part in one] == [[0, 1], []]


# --- files


def test_a_natural_split_of_files(tmp_path: Path) -> None:
    """Paragraphs of a file; files of a folder; a column of a table."""
    natural = {"kind": "natural"}
    assert len(create(natural, file=text_file(tmp_path)).names()) == 40
    folder = tmp_path / "plays"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.md"):
        text_file(folder, name=name)
    assert len(create(natural, file=str(folder)).names()) == 3
    rows = [{"content": "x" * 50, "who": name} for name in ("ann", "bob", "ann")]
    table = str(jsonl(tmp_path / "rows.jsonl", rows))
    assert len(create(natural, file=table, group="who").names()) == 2


def test_a_test_file_and_a_test_part(tmp_path: Path) -> None:
    rows = [{"text": "to be or not to be, that is the question"}] * 4
    jsonl(tmp_path / "train.jsonl", rows)
    jsonl(tmp_path / "test.jsonl", rows[:1])
    central = create(file=str(tmp_path)).central()
    assert central is not None
    assert len(central) == math.ceil(len("to be or not to be, that is the question") / 17)
    assert create(file=str(tmp_path / "train.jsonl")).central() is None
    assert create(file=text_file(tmp_path), test_file=text_file(tmp_path, "abc", "t.txt")).central() is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stride": 18}, r"task.stride = 18; allowed: 1 to task.length \+ 1 = 17"),
        ({"group": "who"}, "task.group = 'who' belongs to partition.kind = 'natural'"),
        ({"model": "bet"}, "task.model = 'bet' is no causal model"),
        ({"config": {"n_embed": 4}}, "task.config: 'n_embed' is no number of 'gpt2'"),
        ({"config": {"vocab_size": 4}}, "vocab_size follows from the other settings"),
        ({"heads": 3}, "width = 16 is no multiple of heads = 3"),
        ({"lora_alpha": 3}, "lora_alpha without lora_rank > 0"),
        ({"lora_rank": 2, "frozen": ["*"]}, "frozen beside lora_rank"),
        ({"frozen": ["transformer.x*"]}, r"task.frozen: 'transformer.x\*' is no parameter"),
        ({"frozen": ["*"]}, "leaves nothing to train"),
        ({"model": "mamba", "dropout": 0.1}, "task.dropout = 0.1"),
        ({"lora_rank": 2, "lora_targets": ["none"]}, "task.model = 'gpt2' cannot be made"),
        ({"file": "latin.txt"}, "no UTF-8 text, at byte 1"),
        ({"file": "empty.txt"}, "holds no text"),
        ({"file": "one.txt"}, "nothing to predict"),
        ({"pretrained": "away"}, "width, layers, heads beside pretrained|heads, layers, width beside pretrained"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said(options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"a\xe9 b c")
    text_file(tmp_path, "", "empty.txt")
    text_file(tmp_path, "a", "one.txt")
    with pytest.raises(SettingsError, match=said):
        create(**{"file": text_file(tmp_path), **options}).model()


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_texts_have_no_classes(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SettingsError, match=f"partition.kind = '{kind}' splits by classes"):
        create({"kind": kind, "clients": 2}, file=text_file(tmp_path))


# --- models


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt", "bert"])
def test_kinds_of_models(kind: str, tmp_path: Path) -> None:
    """By the same four numbers, in any of them; BERT is made to look back alone. Filling changes nothing."""
    task = create(file=text_file(tmp_path), model=kind)
    model = build(task, 0)
    again = build(task, 0)
    assert torch.equal(model.vector, again.vector)
    module = model.module.eval()
    inputs = task.pool().inputs[:1].clone()
    long, short = inputs.clone(), inputs.clone()
    short[:, 8:] = -1
    with torch.no_grad():
        torch.testing.assert_close(task.forward(module, long)[:, :8], task.forward(module, short)[:, :8])
    assert task.forward(module, long).shape == (1, 16, 257) == (1, 16, task.output_size(module))


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    from common.models.causal import _require_causal

    class Ahead(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return functional.one_hot(tokens.flip(1), 3).float()

    with pytest.raises(SettingsError, match="looks at later tokens"):
        _require_causal(Ahead(), "task.model = 'x'")


def test_adapters_alone_are_trained(tmp_path: Path) -> None:
    """A (2, 16) and B (48, 2) of GPT-2's one layer; elsewhere of what peft knows."""
    layout = build(create(file=text_file(tmp_path), lora_rank=2), 0).layout
    assert sorted(slot.shape for slot in layout.values()) == [(2, 16), (48, 2)]
    assert build(create(file=text_file(tmp_path), lora_rank=2, model="llama"), 0).layout


def test_frozen_parts_stay(tmp_path: Path) -> None:
    layout = build(create(file=text_file(tmp_path), frozen=["transformer.w*"]), 0).layout
    assert layout
    assert not [name for name in layout if name.startswith("transformer.w")]


def test_a_folder_of_weights_and_tokenizer(tmp_path: Path) -> None:
    """What transformers saved is what is loaded, with its own tokens; or with bytes. It is never cut by `length`."""
    import tokenizers
    import transformers

    letters = {letter: number for number, letter in enumerate([*sorted(set(TEXT)), "<end>"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<end>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    place = tmp_path / "held"
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>").save_pretrained(place)
    config = transformers.GPT2Config(vocab_size=len(letters), n_positions=16, n_embd=8, n_layer=1, n_head=2)
    saved = transformers.GPT2LMHeadModel(config)
    saved.save_pretrained(place)
    asked = TaskSettings(name="causal-lm", file=text_file(tmp_path), length=16, pretrained=str(place))
    task = tasks.create(asked, PartitionSettings(clients=2), 0)
    assert isinstance(task, CausalLM)
    assert task.pool().inputs[0].tolist() == [letters[letter] for letter in TEXT[:16]]
    assert len(task.pool()) == math.ceil(len(TEXT) / 17)
    module = build(task, 0).module.eval()
    with torch.no_grad():
        want = saved.eval()(task.pool().inputs[:2].long()).logits
        torch.testing.assert_close(task.forward(module, task.pool().inputs[:2]), want)
    own = create(file=text_file(tmp_path), tokenizer=str(place))
    assert own.encoder.vocabulary == len(letters)
    bad = {"it reads 16 tokens": {"length": 17}, "tokenizer has 257": {"tokenizer": "bytes", "length": 16}}
    for said, more in bad.items():
        asked = TaskSettings(name="causal-lm", file=text_file(tmp_path), pretrained=str(place), **more)
        with pytest.raises(SettingsError, match=said):
            tasks.create(asked, PartitionSettings(clients=2), 0).model()


# --- metrics and runs


def test_perplexity_is_that_of_all_tokens(tmp_path: Path) -> None:
    """By hand, whatever the batches and however long the windows; over clients the pooled one."""
    task = create({"clients": 3, "holdout": 0.3}, file=text_file(tmp_path, TEXT[:-7]), dtype="float64")
    module = build(task, 0).module.eval()
    scoring = Scoring(task, module, EvaluateSettings())
    parts = [task.client(name).evaluate for name in task.names()]
    pooled = scoring.pooled([scoring.measure(module, part, 4) for part in parts])
    total, count = 0.0, 0
    for part in parts:
        with torch.no_grad():
            log = task.forward(module, part.inputs).log_softmax(2)
        for row, follow in zip(log, part.targets.long(), strict=True):
            known = follow >= 0
            total -= float(row[known].gather(1, follow[known][:, None]).sum())
            count += int(known.sum())
    assert count < sum(part.targets.numel() for part in parts)
    assert pooled["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
    assert scoring.headline(pooled) == "perplexity"
    assert not scoring.higher("perplexity")


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2}, {"frozen": ["model.decoder.embed*"], "model": "opt"}], ids=str)
def test_a_run_learns(tmp_path: Path, more: dict[str, Any]) -> None:
    asked = experiment(task={"file": text_file(tmp_path), **more})
    run(InProcessGrid(app), asked, RunFolder(tmp_path / "a"))
    first, last = (RunFolder(tmp_path / "a").history()[i]["clients"]["perplexity"]["weighted"] for i in (0, -1))
    assert last < first < 300


def test_sites_bring_their_own(tmp_path: Path) -> None:
    """Text files and tables alike; the server has a test file."""
    files = {"a": Path(text_file(tmp_path)), "b": jsonl(tmp_path / "b.jsonl", [{"text": TEXT}] * 2)}
    asked = experiment(round={"wait_for": 2, "deadline_s": 60.0}, task={"test_file": text_file(tmp_path, name="t.txt")})
    end = run(SiteGrid(files), asked, RunFolder(tmp_path / "a"), strict=False)
    assert end["central"]["perplexity"] < 257


@pytest.mark.rest
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(300)
def test_one_answer_of_all_engines(tmp_path: Path) -> None:
    """Shakespeare's roles by the column `role` in process and under VCE; sites' own files over gRPC."""
    held = roles(*read_corpus(CORPUS, "train"))
    spoken = ["".join(LETTERS[letter] for letter in role.text[:3000].tolist()) for role in held[:60]]
    texts = [text for text in spoken if len(text) > 500][:12]
    files = {}
    for i, name in enumerate("abc"):
        files[name] = jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts[i::3]])
    rows = [{"text": text, "role": str(i % 3)} for i, text in enumerate(texts)]
    pooled = str(jsonl(tmp_path / "all.jsonl", rows))
    natural = experiment(task={"file": pooled}, partition={"kind": "natural", "holdout": 0.2})
    here = run(InProcessGrid(app), natural, RunFolder(tmp_path / "here"))
    quiet = {"say": lambda text: None, "show": lambda record: None}
    vce.simulate(natural, RunFolder(tmp_path / "vce"), app, resume=False, workers=1, **quiet)  # type: ignore[arg-type]
    assert RunFolder(tmp_path / "vce").status()["sha256"] == here["sha256"]

    asked = experiment()
    here = run(SiteGrid(files), asked, RunFolder(tmp_path / "own"), strict=False)
    folder = over_grpc(asked, files, tmp_path)
    assert folder.status().get("sha256") == here["sha256"], folder.status()
