"""The house, drawn from its imports: who stands on whom.

    python -m benchmarks.house                     # server, client, strategies, common
    python -m benchmarks.house server.rounds       # one room from inside
    python -m benchmarks.house --write             # the picture in CONTRIBUTING.md and the list in docs/house.md anew

A room is a file or a folder at a package's top; an arrow is one room that imports another, wherever the line stands
(in a function, under TYPE_CHECKING). A room's floor is one above the highest that it imports; rooms of a floor know
nothing of each other. A circle is rooms that reach each other; its upward arrows are the fewest without which there
would be none. A folder's name ends with "/".
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path
from textwrap import fill, wrap

from grimp import ImportGraph, build_graph

from common.flower import ROOT

PACKAGES = ("server", "client", "strategies", "common")
EMPTY = {
    "server": "The server process: runs, comparisons of runs, reports of both",
    "client": "The client process: local training, its memory, and the way to a server",
}
"""Flower runs these packages' `__init__` when it looks for the apps: they hold nothing."""
Arrow = tuple[str, str]
"""Who imports, what is imported."""


@dataclass(frozen=True)
class House:
    """A package's rooms by floor from the ground up, its arrows, those that run upward, and its circles."""

    package: str
    floors: list[list[str]]
    arrows: set[Arrow]
    upward: set[Arrow]
    circles: list[set[str]]

    @property
    def rooms(self) -> int:
        return sum(map(len, self.floors))


def measure(graph: ImportGraph, package: str) -> House:
    """Read a package's rooms and floors from an import graph."""
    folders = {room: bool(graph.find_children(room)) for room in graph.find_children(package)}
    names = {room: room.removeprefix(f"{package}.") + "/" * folder for room, folder in folders.items()}
    room_of = {module: name for room, name in names.items() for module in {room, *graph.find_descendants(room)}}
    arrows = {
        (room_of[module], room_of[imported])
        for module in room_of
        for imported in graph.find_modules_directly_imported_by(module)
        if room_of.get(imported, room_of[module]) != room_of[module]
    }
    circles = _circles(names.values(), arrows)
    upward = {arrow for circle in circles for arrow in _upward(circle, arrows)}
    return House(package, _floors(names.values(), arrows - upward), arrows, upward, circles)


def picture(house: House) -> list[str]:
    """The floors from the top down, with what is wrong."""
    lines = []
    for number in range(len(house.floors), 0, -1):
        head = house.package if number == len(house.floors) else ""
        for text in wrap("   ".join(house.floors[number - 1]), 96, break_on_hyphens=False):
            lines.append(f"{head:<{len(house.package)}}  {number:>2}  {text}")
            head, number = "", 0
    lines = [line.replace("   0  ", "      ") for line in lines]
    lines += [f"    upward: {importer} -> {imported}" for importer, imported in sorted(house.upward)]
    lines += [f"    circle: {', '.join(sorted(circle))}" for circle in house.circles]
    return lines


def table(houses: Iterable[House]) -> list[str]:
    """A row a package."""
    lines = ["| package | rooms | floors | arrows | upward arrows | circles |", "| --- " * 6 + "|"]
    for each in houses:
        numbers = (each.rooms, len(each.floors), len(each.arrows), len(each.upward), len(each.circles))
        lines.append(f"| {each.package} | {' | '.join(map(str, numbers))} |")
    return lines


def files(package: str) -> list[str]:
    """Every folder and file of a package with the first sentence of its docstring, a Markdown list."""
    told = EMPTY.get(package) or first_sentence(ROOT / package / "__init__.py")
    lines = [f"## {package}/", "", f"{told}.", ""]
    for path in sorted((ROOT / package).rglob("*.py")):
        folder = path.name == "__init__.py"
        place = path.parent if folder else path
        depth = len(place.relative_to(ROOT / package).parts) - 1
        if depth < 0:
            continue
        name, told = place.name + "/" * folder, first_sentence(path)
        text = f"* `{name}`: {told}" if told else f"* `{name}`"
        lines.append(fill(text, 120, initial_indent="  " * depth, subsequent_indent="  " * depth + "  "))
    return lines


def write(drawn: str, listed: str) -> None:
    """Put picture and list in their places."""
    contributing, house = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "house.md"
    text = contributing.read_text("utf-8")
    contributing.write_text(re.sub(r"(?s)(?<=```text\n).*?(?=\n```)", lambda _: drawn, text), "utf-8")
    head, _, _ = house.read_text("utf-8").partition("\n## ")
    house.write_text(f"{head}\n{listed}\n", "utf-8")


def first_sentence(path: Path) -> str:
    """Of a module's docstring; "" without one."""
    told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=[.:])\s(?=[A-Z\n])|\n\n", told, maxsplit=1)[0].replace("\n", " ").rstrip(".:;")


def _reach(rooms: Iterable[str], arrows: set[Arrow]) -> dict[str, set[str]]:
    """Room -> all that it stands on, itself only in a circle."""
    found = {room: {imported for importer, imported in arrows if importer == room} for room in rooms}
    for middle in found:
        for reached in found.values():
            if middle in reached:
                reached |= found[middle]
    return found


def _circles(rooms: Iterable[str], arrows: set[Arrow]) -> list[set[str]]:
    reach = _reach(rooms, arrows)
    circles = {frozenset(other for other in reach[room] if room in reach[other]) for room in reach}
    return sorted((set(circle) for circle in circles if circle), key=sorted)


def _upward(circle: set[str], arrows: set[Arrow]) -> set[Arrow]:
    """The fewest arrows of a circle whose loss opens it."""
    inner = sorted(arrow for arrow in arrows if set(arrow) <= circle)
    for count in range(1, len(inner) + 1):
        for some in combinations(inner, count):
            if not _circles(circle, set(inner) - set(some)):
                return set(some)
    raise AssertionError("no arrows, no circle")


def _floors(rooms: Iterable[str], arrows: set[Arrow]) -> list[list[str]]:
    floor: dict[str, int] = {}
    below = {room: {imported for importer, imported in arrows if importer == room} for room in rooms}
    for room in TopologicalSorter(below).static_order():
        floor[room] = 1 + max((floor[each] for each in below[room]), default=0)
    found: list[list[str]] = [[] for _ in range(max(floor.values(), default=0))]
    for room in sorted(floor):
        found[floor[room] - 1].append(room)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; exit code 1 if an arrow runs upward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="dotted; default: the four")
    parser.add_argument("--write", action="store_true", help="into the documents, too")
    options = parser.parse_args(arguments)
    graph = build_graph(*PACKAGES, cache_dir=None)
    houses = [measure(graph, package) for package in options.packages]
    drawn = "\n\n".join("\n".join(picture(house)) for house in houses)
    print(drawn, "", *table(houses), sep="\n")
    if options.write:
        write(drawn, "\n\n".join("\n".join(files(package)) for package in options.packages))
    return 1 if any(house.upward for house in houses) else 0


if __name__ == "__main__":
    sys.exit(main())
