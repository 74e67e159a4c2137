"""Figures and tables for a paper: what is in the files, and that LaTeX takes them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib import font_manager
from typer.testing import CliRunner

from common.errors import SettingsError
from server import report
from server.__main__ import cli
from server.report.latex import escaped, latex
from server.report.scores import Mean
from server.report.tables import Cell, Table, bold_best, bound, in_one_unit, rounded, spread
from tests.support.written_runs import record, write_cell, write_run

HOSTILE = r"50% of A_1 & B\end{tabular}\input{x} #{$x^2$}~ 'q' \"r\" <α> ∫ é –"
COMMANDS = {
    "begin", "end", "toprule", "midrule", "bottomrule", "textbf", "boldmath", "bfseries", "pm", "times", "ensuremath",
    "textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar", "textasciigrave",
    "textdagger", "mu", "leq", "geq", "infty", "alpha",
}  # fmt: skip


def parsed(text: str) -> list[list[str]]:
    """The cells of a .tex file as LaTeX reads it, or an AssertionError: comments, groups and formulas closed, known
    commands alone, as many cells in each row as columns, no letter that fonts lack."""
    body = "\n".join(line for line in text.split("\n") if not line.startswith("%"))
    assert body.isprintable() or set(body) - {"\n"} == {c for c in body if c.isprintable()}
    start = re.match(r"\s*\\begin\{tabular\}\{@\{\}(l r*)@\{\}\}\n".replace(" ", ""), body)
    assert start, body[:80]
    assert body.rstrip().endswith("\\end{tabular}")
    inner = body[start.end() : body.rindex("\\end{tabular}")]
    assert set(re.findall(r"\\([a-zA-Z]+)", inner)) <= COMMANDS
    for letter in inner:
        assert letter <= "\u017f", letter
    depth, formula, cells, cell, at = 0, False, [[]], "", 0
    while at < len(inner):
        if inner.startswith("\\\\", at):
            assert (depth, formula) == (0, False)
            cells[-1].append(cell.strip())
            cells.append([])
            cell, at = "", at + 2
            continue
        if inner[at] == "\\":
            cell, at = cell + inner[at : at + 2], at + 2
            continue
        letter = inner[at]
        assert letter not in ("%#~" if formula else "%#~^_"), inner[max(0, at - 20) : at + 20]
        depth += {"{": 1, "}": -1}.get(letter, 0)
        formula ^= letter == "$"
        assert depth >= 0
        if letter == "&":
            assert (depth, formula) == (0, False)
            cells[-1].append(cell.strip())
            cell = ""
        else:
            cell += letter
        at += 1
    assert (depth, formula) == (0, False)
    rows = [[re.sub(r"\\(top|mid|bottom)rule", "", one).strip() for one in row] for row in cells if row]
    assert {len(row) for row in rows} == {len(start[1])}
    return rows


def compiled(folder: Path, name: str) -> None:
    """The table in a document of its own, where LaTeX is installed."""
    engine = shutil.which("pdflatex") or shutil.which("tectonic")
    if engine is None:
        return
    text = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{NAME}\\end{document}"
    (folder / "document.tex").write_text(text.replace("NAME", name), "utf-8")
    words = [engine, "document.tex"] if engine.endswith("tectonic") else [engine, "-halt-on-error", "document.tex"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Figures of a plan of two variants (one of a hostile name), two points, two seeds, clients evaluated."""
    root = tmp_path_factory.mktemp("paper")
    roll = [{"name": f"$x_{n}$", "labels": f"[{n + 1}, {9 - n}]"} for n in range(3)]
    for place, variant in enumerate(("FedAvg", HOSTILE)):
        for alpha in (0.1, 1.0):
            for seed in (0, 1):
                lines = []
                for number in range(1, 5):
                    accuracy = number / 10 + place / 3 + seed / 50
                    each = {"accuracy": {one["name"]: accuracy * (1 - n / 10) for n, one in enumerate(roll)}}
                    lines.append(record(number, accuracy, each=each))
                write_cell(
                    root / "plan", variant, lines, seed=seed, point={"partition.alpha": alpha}, roll=roll, alpha=alpha,
                    targets=[0.3], place=f"v{place}-{alpha}",
                )  # fmt: skip
    report.write([root / "plan"], [], root / "page.html", window=1, figures=root / "figures", percent=True)
    return root / "figures"


def test_each_chart_is_a_file_with_a_sensible_name(written: Path) -> None:
    """As PDF and as SVG; no dot but before the ending, which LaTeX would misread."""
    names = {path.name for path in written.iterdir()}
    stems = {name.removesuffix(".pdf") for name in names if name.endswith(".pdf")}
    assert stems == {name.removesuffix(".svg") for name in names if name.endswith(".svg")}
    points = ("0_1", "1")
    pairs = [(metric, axis) for metric in ("accuracy", "loss") for axis in ("round", "bytes", "seconds")]
    pairs += [(what, "round") for what in ("agreement", "clients-10th-percentile")]
    wanted = {f"{what}-by-{axis}--partition-alpha-{alpha}" for what, axis in pairs for alpha in points}
    assert wanted <= stems
    assert sum(stem.startswith("clients--") for stem in stems) == 4
    assert sum(stem.startswith("partition") for stem in stems) == 1
    assert all(name.count(".") == 1 for name in names)
    assert "; seeds 0, 1" in (written / "caption.txt").read_text("utf-8")


def test_figures_are_a_column_wide_with_fonts_inside(written: Path) -> None:
    """3.3 in = 237.6 pt; TrueType within the PDF, no Type 3; text as paths in the SVG; no title; the date is none."""
    for path in written.glob("*.pdf"):
        content = path.read_bytes()
        box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", content)
        assert box, path
        assert float(box[1]) == pytest.approx(237.6), path
        assert b"/FontFile2" in content, path
        assert b"/Type3" not in content, path
        assert b"CreationDate" not in content
    for path in written.glob("*.svg"):
        text = path.read_text("utf-8")
        assert 'width="237.6pt"' in text
        assert "<text" not in text
        assert "font-family" not in text
    assert Path(font_manager.findfont("DejaVu Sans", fallback_to_default=False)).exists()


def test_the_same_runs_make_the_same_files(written: Path, tmp_path: Path) -> None:
    """To the byte: a figure in a repository does not change by itself."""
    report.write([written.parent / "plan"], [], tmp_path / "p.html", window=1, figures=tmp_path / "f", percent=True)
    for path in written.iterdir():
        assert (tmp_path / "f" / path.name).read_bytes() == path.read_bytes(), path.name


def test_tables_are_latex(written: Path) -> None:
    """Each of them; the numbers in percent with deviations, bold beyond the spread; a name that would end the table."""
    tables = {path.stem: path.read_text("utf-8") for path in written.glob("*.tex")}
    assert {"summary", "to-the-target", "accuracy-by-variant-and-point", "differences-over-shared-seeds"} <= set(tables)
    rows = {name: parsed(text) for name, text in tables.items()}
    assert rows["accuracy-by-variant-and-point"] == [
        ["variant", r"partition alpha = 0.1 (\%)", r"partition alpha = 1 (\%)"],
        ["FedAvg", r"$41.0 \pm 1.4$", r"$41.0 \pm 1.4$"],
        [escaped(HOSTILE), *[r"{\boldmath\bfseries $74.3 \pm 1.4$}"] * 2],
    ]
    assert "bytes (B)" in rows["summary"][0]
    assert "last" not in rows["summary"][0]
    assert any(name.endswith("(points)") for name in rows["differences-over-shared-seeds"][0])
    for name in tables:
        compiled(written, name)


def test_text_is_escaped_whatever_it_is() -> None:
    """Every printable letter of the first pages, alone and between letters."""
    for code in (*range(0x20, 0x250), *range(0x370, 0x400), 0x2013, 0x2202, 0x4E2D, 0x1F600, 0x202E):
        table = Table("t", ("a", f"b{chr(code)}"), [[Cell(f"x{chr(code)}y"), Cell("1")]], notes=[f"n{chr(code)}%"])
        made = latex(table, f"caption {chr(code)}\n\\bad")
        body = [line for line in made.splitlines() if not line.startswith("%")]
        assert "\\bad" not in "\n".join(body)
        inner = re.sub(r"\\ensuremath\{\\[a-zA-Z]+\}", "", made)
        parsed(inner)


def test_numbers_of_a_table() -> None:
    """A bound, a tiny number, no number, a unit in the head if it is one, in the cell if there are several."""
    cells = [spread(Mean(100.0, 1.0, 2)), spread(Mean(1e-9, 0.0, 2)), bound(Mean(20.0, 0.0, 2), "{:.1f}"), Cell("–")]
    table = Table("t", ("n", "v"), rounded([[Cell("r"), cell] for cell in cells], [1]))
    assert [row[1] for row in parsed(latex(table, "c"))] == [
        "v", r"$100 \pm 1$", r"$1.0 \times 10^{-9} \pm 0$", "$> 20$", "--",
    ]  # fmt: skip
    sent = in_one_unit([[Cell("r"), bound(Mean(5e6, 0.0, 2), "")]], [1])
    assert parsed(latex(Table("t", ("n", "bytes"), sent), "c")) == [["n", "bytes (MB)"], ["r", "$> 5.0$"]]
    own = bold_best([[Cell("r"), spread(Mean(0.9, 0.01, 2), after="own")], [Cell("s"), spread(Mean(0.1, 0.01, 2))]], 1)
    assert parsed(latex(Table("t", ("n", "v"), own, shares=("v",)), "c", percent=True))[1][1] == (
        r"{\boldmath\bfseries $90.0 \pm 1.0$ own}"
    )


def test_percent_is_of_shares_alone(tmp_path: Path) -> None:
    """An error says of what not; without figures it has no meaning; a folder that cannot be written is named."""
    lines = [record(1, None, central={"mae": 2.0}, clients={}, each={}, task={})]
    write_run(tmp_path / "a", lines, status={"headline": "mae", "metrics": {"mae": False}})
    out = tmp_path / "page.html"
    with pytest.raises(SettingsError, match="--percent: mae is no share"):
        report.write([tmp_path / "a"], [], out, figures=tmp_path / "f", percent=True)
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "a"), "--out", str(out), "--percent"])
    assert result.exit_code in (1, 2)
    assert "--figures" in result.output
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"figures in '.*file' cannot be written"):
        report.write([tmp_path / "a"], [], out, figures=tmp_path / "file")


def test_many_groups_have_a_legend_apart(tmp_path: Path) -> None:
    """More than eight would leave no room for the curves; all names are in it, as they are."""
    for number in range(10):
        write_run(tmp_path / "runs" / str(number), [0.1, 0.2 + number / 50], alpha=1.0 + number, name=f"n$_{number}")
    result = CliRunner().invoke(
        cli, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "p.html"), "--figures", str(tmp_path / "f")]
    )
    assert result.exit_code == 0, result.output
    assert f"figures {tmp_path / 'f'}" in result.output
    assert (tmp_path / "f" / "legend.pdf").exists()
    assert (tmp_path / "f" / "accuracy-by-round.svg").exists()
