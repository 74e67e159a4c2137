"""Tables for a paper: LaTeX with booktabs, a file a table, each a tabular that stands in any document."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from server.report.render import TEMPLATES
from server.report.scores import Mean
from server.report.tables import DASH, Cell, Number, Table

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True,
    variable_start_string="<<", variable_end_string=">>", block_start_string="<%", block_end_string="%>",
    comment_start_string="<#", comment_end_string="#>",
)  # fmt: skip

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''{}", "`": r"\textasciigrave{}",
    "–": "--", "—": "---", "±": r"\ensuremath{\pm}", "×": r"\ensuremath{\times}", "†": r"\textdagger{}",
    "µ": r"\ensuremath{\mu}", "≤": r"\ensuremath{\leq}", "≥": r"\ensuremath{\geq}", "∞": r"\ensuremath{\infty}",
    "[": "{[}", "]": "{]}",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
_CAPITALS = frozenset(["gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "phi", "psi", "omega"])


def escaped(text: str) -> str:
    """Text as LaTeX prints it, of any engine; what its standard fonts lack is told by its number."""
    return "".join(map(_letter, " ".join(text.split())))


def _letter(letter: str) -> str:
    if letter in _SPECIAL:
        return _SPECIAL[letter]
    if letter.isascii():
        return letter if letter.isprintable() else ""
    name = unicodedata.name(letter, "")
    word = name.rpartition(" ")[2].lower().replace("lamda", "lambda")
    if name.startswith("GREEK ") and " LETTER " in name and name.count(" ") == 3 and word in _GREEK.split():
        if "SMALL" in name:
            return rf"\ensuremath{{\{word}}}"
        if word in _CAPITALS:
            return rf"\ensuremath{{\{word.capitalize()}}}"
    if letter <= "\u017f" and letter.isalpha():
        return letter  # of the encoding that LaTeX has by itself
    return f"U+{ord(letter):04X}"


def latex(table: Table, caption: str, percent: bool = False) -> str:
    """The table as shown at first, with its digits; `caption` is a comment above it."""
    kept = [at for at, name in enumerate(table.columns) if name not in table.extra]
    heads, columns = [], []
    for at in kept:
        share = percent and table.columns[at] in table.shares
        cells = [_percent(row[at]) if share else row[at] for row in table.rows]
        unit = _unit(cells)
        heads.append(escaped(table.columns[at] + (" (%)" if share else f" ({unit})" if unit else "")))
        columns.append([_cell(cell, bool(unit)) for cell in cells])
    kinds = "l" + "r" * (len(kept) - 1)
    rows = list(zip(*columns, strict=True))
    notes = [_comment(note) for note in (table.title, caption, *table.notes)]
    return _ENVIRONMENT.get_template("table.tex").render(kinds=kinds, heads=heads, rows=rows, notes=notes)


def _percent(cell: Cell) -> Cell:
    found = cell.number
    if found is None:
        return cell
    deviation = None if found.mean.deviation is None else 100 * found.mean.deviation
    number = Number(Mean(100 * found.mean.mean, deviation, found.mean.n), max(0, found.decimals - 2), after=found.after)
    return Cell(cell.text, cell.value, cell.best, number=number)


def _unit(cells: Sequence[Cell]) -> str:
    """The one unit of a column; "" where there is none."""
    units = {cell.number.unit for cell in cells if cell.number}
    return units.pop() if len(units) == 1 else ""


def _cell(cell: Cell, bare: bool) -> str:
    found = cell.number
    if found is None or not math.isfinite(found.mean.mean):
        shown = "--" if cell.text == DASH else escaped(cell.short or cell.text)
        return rf"\textbf{{{shown}}}" if cell.best else shown
    whole = found.before and not found.unit and found.mean.mean == round(found.mean.mean)
    number = f"{found.mean.mean:.{0 if whole else found.decimals}f}"
    if found.mean.mean and not float(number):
        mantissa, _, power = f"{found.mean.mean:.1e}".partition("e")
        number = rf"{mantissa} \times 10^{{{int(power)}}}"
    if found.before:
        number = f"> {number}"
    elif found.mean.deviation is not None:
        number += rf" \pm {found.mean.deviation:.{found.decimals}f}"
    words = " ".join(filter(None, ("" if bare else escaped(found.unit), escaped(found.after))))
    made = f"${number}$" + (f" {words}" if words else "")
    return rf"{{\boldmath\bfseries {made}}}" if cell.best else made


def _comment(text: str) -> str:
    """Text that cannot end its line."""
    return " ".join(text.split())
