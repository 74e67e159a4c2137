"""docs/own.md and docs/metrics.md, typed by a user: every module and every experiment of theirs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from common.experiment import Experiment
from common.flower import ROOT
from common.tasks.digits import _table
from server.report.frames import history
from server.rounds.records import headline
from tests.support.faults import ran

BLOCK = re.compile(r"```(python|toml)\n(.*?)```", re.DOTALL)
MODULES = ("mine", "judged", "pairs", "careful", "mymetrics", "mymore")


def blocks(page: str, kind: str) -> list[str]:
    return [text for of, text in BLOCK.findall((ROOT / "docs" / page).read_text("utf-8")) if of == kind]


@pytest.fixture
def _typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules in a folder of the user's, and a file of numbers."""
    for text in [*blocks("own.md", "python"), *blocks("metrics.md", "python")]:
        name = text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    table = _table()
    np.savez(tmp_path / "numbers.npz", x_train=table[:600, :-1] / 16, y_train=table[:600, -1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_typed")
@pytest.mark.parametrize("number", range(len(blocks("own.md", "toml"))))
def test_every_experiment_of_the_page_runs(number: int, tmp_path: Path) -> None:
    settings = Experiment.parse(blocks("own.md", "toml")[number])
    records = ran(tmp_path / "run", settings).history
    assert len(history(records)) == 3
    found = headline(records[-1])
    assert found.value is not None
    assert found.metric == {"numbers": "rmse", "judged": "among-two", "pairs": "r2"}.get(settings.name, "accuracy")


@pytest.mark.usefixtures("_typed")
def test_the_metrics_of_the_other_page_are_metrics(tmp_path: Path) -> None:
    for text in blocks("metrics.md", "toml"):
        ran(tmp_path / str(len(text)), Experiment.parse(f"rounds = 1\n{text}"))
    names = ["mymore:specificity", "mymetrics:among_two"]
    settings = Experiment.model_validate({"rounds": 1, "evaluate": {"metrics": names}})
    assert {"specificity", "among-two"} <= set(ran(tmp_path / "more", settings).history[-1]["central"])
