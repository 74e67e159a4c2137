"""Checks of a machine before it takes part: what a check is, how checks are shown, and those that both sides share."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from common import flower
from common.errors import SettingsError

T = TypeVar("T")

PYTHONS = ((3, 11), (3, 14))
"""First one supported and first one not."""
LEAST_FREE_BYTES = 1e9
NAME_WIDTH = 13
VERSIONS_S = 15.0
"""Loading Flower takes half a second, on a busy machine ten."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `ok`: True well, False it will not work, None a warning, or without `advice` not checked."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""

    @property
    def word(self) -> str:
        """How it is shown."""
        return {True: "ok", False: "FAIL", None: "warn" if self.advice else "-"}[self.ok]


def show(checks: Iterable[Check], write: Callable[[str], None] = print) -> int:
    """Write a line a check as they come, and what to do; returns the exit code: 1 if one fails, else 0."""
    failed = warned = 0
    for check in checks:
        failed += check.ok is False
        warned += check.word == "warn"
        write(f"{check.word:<5} {check.name:<{NAME_WIDTH}} {check.detail}")
        if check.advice and not check.ok:
            write(f"{'':<5} {'':<{NAME_WIDTH}} -> {check.advice}")
    write(f"{failed} failed, {warned} warnings" if failed or warned else "all well")
    return 1 if failed else 0


def each(name: str, make: Callable[[], Iterable[Check]], limit_s: float = 8.0) -> Iterator[Check]:
    """The checks that `make` gives; what it raises is a failed one. After `limit_s` seconds the rest is not awaited."""
    found: list[Check] = []

    def collect() -> None:
        found.extend(make())

    try:
        within(limit_s, collect)
    except TimeoutError:
        yield from list(found)
        yield Check(
            name, None, f"not done within {limit_s:g} s", "look at it by itself: this may be slow or hang later"
        )
    except SettingsError as error:
        yield Check(name, False, str(error), "the line above says what is allowed")
    except Exception as error:
        yield Check(name, False, f"{type(error).__name__}: {error}", "this was not foreseen: read the message")
    else:
        yield from found


def within(limit_s: float, function: Callable[[], T]) -> T:
    """What `function` returns or raises, or TimeoutError after `limit_s` seconds; it is then left to itself.

    For calls that have no time limit of their own, such as name resolution.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]


def versions(packages: Iterable[str] = ("flwr", "torch", "grpcio", "protobuf", "cryptography")) -> Iterator[Check]:
    """Python's and the packages' versions; Flower's generated code is loaded, which fails on a protobuf too old."""
    python = ".".join(map(str, sys.version_info[:3]))
    found, missing = [f"python {python}"], []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    fault, advice = "", ""
    first, end = (".".join(map(str, each)) for each in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        fault, advice = f"python {python} is not supported", f"install a Python from {first} to below {end}"
    elif missing:
        fault, advice = f"not installed: {', '.join(missing)}", "pip install -e . -c constraints.txt"
    else:
        try:
            flower.check_version()
            import flwr.proto.fleet_pb2_grpc  # noqa: F401  # what a doctor looks for may be missing
        except Exception as error:
            fault, advice = str(error), "pip install -e . -c constraints.txt"
    yield Check("versions", not fault, fault or ", ".join(found), advice)


def writable(name: str, folder: Path, need_bytes: float = 0.0) -> Iterator[Check]:
    """Whether a file can be written, flushed and deleted in `folder`, or where it would be made; and free space.

    `need_bytes`: what is going to be written, beside the gigabyte that should be free anyway.
    """
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    will = "" if place == folder.expanduser().absolute() else f" (to be made in {place})"
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".fedkeel-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        advice = f"give user id {os.getuid()} the right to write there, or choose another folder"
        yield Check(name, False, f"{folder}{will}: {error.strerror}", advice)
        return
    yield Check(name, True, f"{folder}{will} can be written")
    free = shutil.disk_usage(place).free
    least = max(LEAST_FREE_BYTES, need_bytes)
    detail = f"{free / 1e9:.1f} GB free at {place}"
    advice = f"keep {least / 1e9:.1f} GB free, or the disk fills up in mid-run"
    yield Check("disk", None if free < least else True, detail, advice)


def private(name: str, path: Path) -> Iterator[Check]:
    """Whether only its owner can read a file that holds a secret; nothing if so."""
    mode = path.stat().st_mode
    if mode & 0o077:
        yield Check(name, None, f"{path} can be read by others (mode {mode & 0o777:03o})", f"chmod 600 {path}")
