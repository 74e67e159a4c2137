"""Pictures as elements of a page."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # as below

_REFERENCE = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_PICTURES = iter(range(10**9))


def svg(figure: Figure, text: str) -> str:
    """The figure as an element of a page: scales with its box, `text` stands for it, ids are its own.

    Series that the legend switches have `data-series`. Numbers are cut to what a screen shows.
    """
    import matplotlib  # takes half a second that a report without pictures can do without

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedkeel"}), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("xlink:href", "href")
    prefix, referred = f"p{next(_PICTURES)}-", set(_REFERENCE.findall(drawn))

    def named(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("series-"):
            return f' data-series="{name.removeprefix("series-")}"'
        return f' id="{prefix}{name}"' if name in referred else ""

    drawn = re.sub(r'\s+id="([^"]*)"', named, drawn)
    drawn = _REFERENCE.sub(lambda match: match[0].replace("#", f"#{prefix}"), drawn)
    drawn = re.sub(r"(\d\.\d\d)\d+", r"\1", drawn)
    box = re.search(r'viewBox="[^"]*"', drawn)
    head = f'<svg role="img" aria-label="{html.escape(text)}" {box[0] if box else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, drawn, count=1)
