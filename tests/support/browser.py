"""A real headless browser, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def find_browser() -> str | None:
    """The path of Chromium or Chrome: FEDKEEL_CHROMIUM, else what the system has."""
    named = os.environ.get("FEDKEEL_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One headless browser for all tests of a module."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install it, or name one in FEDKEEL_CHROMIUM")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
