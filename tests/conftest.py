"""What all tests share: no telemetry, and skips that say why."""

from __future__ import annotations

import os

from common import flower

flower.prepare()  # before any test module imports flwr

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason. Whole tables run only where a marker is asked for."""
    if not config.option.markexpr:
        whole = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item not in set(whole)]
    missing = {
        "data": None if os.environ.get("FEDKEEL_DATA") else "FEDKEEL_DATA names no folder",
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's folders: Flower's, and that of decoded data sets."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path_factory.getbasetemp() / "flwr-home"))
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
