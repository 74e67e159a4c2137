"""The Flower app bundle (FAB) carries all the code and nothing else; Flower drops files silently."""

from __future__ import annotations

import io
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from common.flower import ROOT
from server.deploy.control import bundle

CODE = ("server", "client", "strategies", "common")


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The files in the bundle, without Flower's own additions."""
    with zipfile.ZipFile(io.BytesIO(bundle(ROOT))) as archive:
        return {name for name in archive.namelist() if not name.startswith(".info")}


def test_all_code_is_in_the_bundle(names: set[str]) -> None:
    """Every module of the four packages, every experiment file, and what Flower's format asks for."""
    code = {p.relative_to(ROOT).as_posix() for package in CODE for p in (ROOT / package).rglob("*.py")}
    experiments = {p.relative_to(ROOT).as_posix() for p in (ROOT / "experiments").rglob("*.toml")}
    assert names == code | experiments | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_launcher_and_flower_build_the_same_bundle() -> None:
    """`server local` collects the files itself, because Flower's walk reads the virtual environment too."""

    def content(raw: bytes) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    assert content(bundle(ROOT)) == content(build_fab_from_disk(ROOT))


def test_app_objects_are_plain_assignments() -> None:
    """Flower finds the two apps by reading the source, and runs whatever the package's __init__ does."""
    for name in ("server", "client"):
        lines = (ROOT / name / "app.py").read_text("utf-8").splitlines()
        assert any(line.startswith("app = ") for line in lines)
        assert (ROOT / name / "__init__.py").read_text("utf-8") == ""


def test_flwr_is_pinned_to_the_last_series_with_grpc() -> None:
    """1.40 moved the server-to-client leg to HTTP."""
    project = tomllib.loads(Path(ROOT / "pyproject.toml").read_text("utf-8"))
    (flwr,) = [d for d in project["project"]["dependencies"] if d.startswith("flwr[")]
    assert ">=1.39" in flwr
    assert "<1.40" in flwr
