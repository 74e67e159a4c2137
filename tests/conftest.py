"""What all tests share: which of them run, on how many processes; no telemetry, and skips that say why."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext

# Two workers on two cores: a thread each. Before torch is imported.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import flower

flower.prepare()  # before any test module imports flwr

import pytest  # noqa: E402

from tests.support.children import owned, watched  # noqa: E402
from tests.support.today import DAY, FULL_DAYS, REST_DAYS, turn  # noqa: E402

OWN_LOGGERS = ("client", "server", "common", "strategies")

SUITES = {
    "daily": "what matters every day: no test marked `rest` or `full` (the default)",
    "draw": "of what is left by daily, the tests whose turn is today (FEDKEEL_DAY)",
    "all": "every test but the cells marked `full`",
    "full": "every test, every cell of every table",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.addoption("--suite", choices=list(SUITES), default="daily", help=f"{told}. A test named by :: always runs.")


def pytest_configure() -> None:
    """All processes of a run that passes midnight are of one day."""
    os.environ["FEDKEEL_DAY"] = str(DAY)


def pytest_report_header(config: pytest.Config) -> str:
    return f"suite: {config.option.suite}, FEDKEEL_DAY={DAY}"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core; for files named on the command line this one, which loads the libraries once."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wanted(item: pytest.Item) -> bool:
    """Whether a test is of the suite asked for."""
    suite, rest, full = item.config.option.suite, item.get_closest_marker("rest"), item.get_closest_marker("full")
    if suite == "full":
        return True
    if suite == "draw":
        return turn(item.nodeid, FULL_DAYS) if full else rest is not None and turn(item.nodeid, REST_DAYS)
    return not full and (suite == "all" or not rest)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose by suite, keep real processes in one worker, skip what this machine cannot run, with the reason."""
    if not any("::" in word for word in config.args):
        out = [item for item in items if not _wanted(item)]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
    for item in items:
        if item.get_closest_marker("processes") or item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.xdist_group("processes"))
            item.add_marker(pytest.mark.slow)
            # Against hanging only: what it waits for is limited by how slow the machine is (tests/support/patience.py).
            given = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(max(1800, given.args[0] if given else 0)), append=False)
        if item.get_closest_marker("data") and not os.environ.get("FEDKEEL_DATA"):
            item.add_marker(pytest.mark.skip(reason="FEDKEEL_DATA names no folder"))
        if item.get_closest_marker("gpu") and not _cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda() -> bool:
    import torch  # seconds of the process that only hands out tests to others

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _watched() -> Iterator[None]:
    """Whatever ends this process, no child of a test stays."""
    with watched():
        yield


@pytest.fixture(autouse=True)
def _children(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of real processes that failed leaves none behind."""
    with owned() if request.node.get_closest_marker("processes") else nullcontext():
        yield


def _loggers() -> list[tuple[str, logging.Logger]]:
    known = list(logging.root.manager.loggerDict.items())
    own = [(name, each) for name, each in known if name.split(".")[0] in OWN_LOGGERS]
    return [(name, each) for name, each in own if isinstance(each, logging.Logger)]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Commands that run in this process quieten loggers; what the next test listens to is as loud as ever."""
    kept = {name: each.level for name, each in _loggers()}
    yield
    for name, each in _loggers():
        each.setLevel(kept.get(name, logging.NOTSET))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's folders: Flower's, and that of decoded data sets."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path_factory.getbasetemp() / "flwr-home"))
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
