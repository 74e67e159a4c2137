"""The page's look and its little script. The script only adds: without it everything can be read."""

CSS = """
:root{color-scheme:light;--ink:#1c2430;--soft:#5b6675;--line:#dfe3e8;--back:#f6f7f9;--link:#0b5cad}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;color:var(--ink);background:#fff;
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:26px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.6rem 0 .6rem;padding-bottom:.25rem;border-bottom:2px solid var(--line)}
h3{font-size:1rem;margin:1.6rem 0 .3rem;overflow-wrap:anywhere}
p{margin:.5rem 0;max-width:75ch;overflow-wrap:anywhere}
a{color:var(--link)}
.lead,.note,figcaption,footer{color:var(--soft)}
.note,figcaption,footer{font-size:.85rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.9rem 0 0;font-size:.92rem}
.warning{border-left:4px solid #b45309;background:#fff7ed;padding:.5rem .9rem;margin:1rem 0}
.scroll{overflow-x:auto;margin:.6rem 0;border:1px solid var(--line);border-radius:6px}
.scroll:focus-visible,button:focus-visible,summary:focus-visible{outline:3px solid #7ab3ef;outline-offset:1px}
.tall{max-height:32rem;overflow-y:auto}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{padding:.38rem .75rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
thead th{background:var(--back);font-weight:600;vertical-align:bottom;position:sticky;top:0;z-index:1}
tr>:first-child{text-align:left;position:sticky;left:0;background:#fff;z-index:2}
tbody tr>:first-child{font-weight:500}
thead tr>:first-child{background:var(--back);z-index:3}
tbody tr>:first-child{white-space:normal;overflow-wrap:anywhere;min-width:16rem;max-width:24rem}
.words :is(th,td){text-align:left}.words td:last-child{white-space:normal;min-width:18rem;overflow-wrap:anywhere}
tbody tr:hover>*{background:#f2f7fd}
th button{all:unset;cursor:pointer;font:inherit}
th button:hover{text-decoration:underline}
th[aria-sort=ascending] button::after{content:" \\25B2";font-size:.7em}
th[aria-sort=descending] button::after{content:" \\25BC";font-size:.7em}
.legend{display:flex;flex-wrap:wrap;gap:.3rem .5rem;margin:.6rem 0;padding:0;list-style:none;font-size:.88rem}
.legend li>*{display:inline-flex;align-items:center;gap:.4rem;padding:.12rem .55rem;border:1px solid var(--line);
 border-radius:999px;background:#fff;color:inherit;font:inherit;overflow-wrap:anywhere;text-align:left}
.legend button{cursor:pointer}
.legend button[aria-pressed=false]{opacity:.4;text-decoration:line-through}
.swatch{width:26px;height:8px;flex:none;vertical-align:middle}
th .swatch{margin-right:.45rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:1rem}
.charts.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,500px),1fr))}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg .off,.off{display:none}
details{margin:.5rem 0;border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem}
summary{cursor:pointer;font-weight:500;overflow-wrap:anywhere}
pre{overflow-x:auto;background:var(--back);padding:.7rem;border-radius:6px;font-size:.8rem;line-height:1.4}
code{font-size:.88em;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.1rem 1rem;font-size:.88rem;margin:.5rem 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
footer{padding-top:1.5rem;padding-bottom:2rem}
@media(max-width:600px){main,header,footer{padding:0 14px}header{padding-top:18px}h1{font-size:1.4rem}
 tbody tr>:first-child{min-width:8.5rem;max-width:11rem}th,td{padding:.34rem .55rem}}
@media print{body{font-size:10pt}nav,footer a{display:none}main,header{max-width:none;padding:0}
 .scroll,.tall{overflow:visible;max-height:none;border:0}table{font-size:7.5pt}
 th,td{padding:.15rem .3rem;white-space:normal}
 tr>:first-child,thead th{position:static}tbody tr>:first-child{min-width:0}
 figure,tr,.warning{break-inside:avoid}h2,h3{break-after:avoid}
 .charts,.charts.wide{grid-template-columns:repeat(2,1fr)}
 *{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
document.querySelectorAll("table").forEach(table => {
  table.querySelectorAll("thead th").forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0], sign = down ? -1 : 1;
      const key = row => {
        const cell = row.cells[at];
        return "value" in cell.dataset ? Number(cell.dataset.value) : null;
      };
      const rows = Array.from(body.rows);
      rows.sort((one, other) => {
        const a = key(one), b = key(other);
        if (a === null && b === null) {
          const words = other.cells[at].textContent;
          return sign * one.cells[at].textContent.localeCompare(words, undefined, {numeric: true});
        }
        if (a === null) return 1;
        if (b === null) return -1;
        return a === b ? 0 : sign * (a - b);
      });
      body.append(...rows);
    });
  });
});
document.querySelectorAll(".legend [data-toggle]").forEach(item => {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.toggle = item.dataset.toggle;
  button.setAttribute("aria-pressed", "true");
  button.title = "Show or hide";
  button.append(...item.childNodes);
  item.replaceWith(button);
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    document.querySelectorAll(`.legend [data-toggle="${button.dataset.toggle}"]`).forEach(
      twin => twin.setAttribute("aria-pressed", String(shown)));
    document.querySelectorAll(`[data-series="${button.dataset.toggle}"]`).forEach(
      drawn => drawn.classList.toggle("off", !shown));
  });
});
"""
