"""The example notebook runs as it is committed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from common.flower import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "digits.ipynb"


def test_the_notebook_is_committed_with_outputs() -> None:
    """Run once from its first cell to its last, and nothing of the machine that did it."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(cell.outputs for cell in code)
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    assert not re.search(r"/(home|root|tmp|work|Users)/|C:\\\\", NOTEBOOK.read_text("utf-8"))


@pytest.mark.processes
@pytest.mark.rest
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, in an empty folder: a frame with a history, one of the plan's means, a picture."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [[output for output in cell.get("outputs", []) if "data" in output] for cell in book.cells]
    shown = [" ".join(output["data"].get("text/plain", "") for output in each) for each in outputs]
    assert "drift" in shown[1]
    assert shown[3].startswith("Sequential(")
    assert "SCAFFOLD" in shown[5]
    assert any("image/png" in output["data"] for output in outputs[7])
    assert (tmp_path / "runs" / "digits-heterogeneity" / "cells.json").exists()
