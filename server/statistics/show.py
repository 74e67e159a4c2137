"""Statistics for people: a line a column, what is far, what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_ROWS, MOST_FAR = 40, 20
BLOCKS = " ▁▂▃▄▅▆▇█"

MEASURES = {
    "mean": "its mean is {:.2f} deviations from the others'",
    "shape": "{:.0%} of its histogram is elsewhere than the others'",
    "labels": "{:.0%} of its labels are other ones than the others'",
    "missing": "its share of missing values differs by {:.0%}",
}


def table(told: Mapping[str, Any]) -> str:
    """A result, as `Statistics.json` has it, as lines."""
    sites, columns = told["sites"], told["columns"]
    lines = [f"{len(sites)} sites, {sum(sites.values()):,} examples"]
    heads = ("examples", "missing", "mean", "deviation")
    lines.append(f"{'column':24} {'kind':8} {heads[0]:>10} {heads[1]:>9} {heads[2]:>12} {heads[3]:>12}  distribution")
    ordered = sorted(columns.items(), key=lambda item: item[1]["kind"] != "labels")
    for name, each in ordered[:MOST_ROWS]:
        lines.append(
            f"{name[:24]:24} {each['kind']:8} {each['examples']:>10,} {each['missing']:>9,} "
            f"{_number(each['mean']):>12} {_number(each['std']):>12}  {_shape(each)}".rstrip()
        )
    if len(columns) > MOST_ROWS:
        lines.append(f"... and {len(columns) - MOST_ROWS} more columns, all in the JSON file")
    kept = {site for each in columns.values() for site in each["withheld"]}
    if kept:
        lines.append(f"kept back in part, by their policies: {', '.join(sorted(kept))}")
    lines += told["schema"]
    for each in told["far"][:MOST_FAR]:
        lines.append(f"far: {each['site']}, {each['column']}: {MEASURES[each['measure']].format(each['distance'])}")
    if len(told["far"]) > MOST_FAR:
        lines.append(f"... and {len(told['far']) - MOST_FAR} more")
    if not told["far"] and len(sites) > 1:
        lines.append("no site is far from the others")
    lines += [f"not in it: {who}: {why}" for who, why in told["refused"].items()]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _shape(column: Mapping[str, Any]) -> str:
    """The histogram as blocks, or the largest classes."""
    if classes := column["classes"]:
        largest = sorted(classes.items(), key=lambda item: (-item[1], item[0]))[:6]
        more = f" ({len(classes)} classes)" if len(classes) > len(largest) else ""
        return " ".join(f"{name}:{count}" for name, count in largest) + more
    most = max(column["bins"], default=0)
    return "".join(BLOCKS[round(each / most * (len(BLOCKS) - 1))] for each in column["bins"]) if most > 0 else ""
