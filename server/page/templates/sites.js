// The sites of a run and of its SuperLink in one table, those that are not well first.
import {fill, say} from "./tables.js";
import {moment} from "./words.js";

const order = new Intl.Collator(undefined, {numeric: true}).compare;

// known, here: rows by name, of the run and of the SuperLink; more: how many are not among them.
export function sites(section, known, here, over, more = 0) {
  const rows = [...new Set([...known.keys(), ...here.keys()])].map(name => {
    const site = known.get(name), node = here.get(name);
    const [rank, word, kind, why] = condition(site, node, over);
    const seen = node?.status === "online" ? {text: "now"} : moment(node?.status === "offline" && node.seen || site?.seen);
    const causes = Object.entries(site?.causes ?? {}).map(([cause, count]) => `${cause} ${count}`).join(", ");
    return {rank, name, cells: [
      {text: name, kind: "name", title: node ? [node.versions, node.arithmetic, node.device].filter(Boolean).join("\n") : ""},
      {text: word, pill: kind, title: why}, seen,
      {text: String(site?.rounds ?? ""), kind: "n"}, {text: String(site?.dropped ?? ""), kind: "n"},
      {text: String(site?.examples ?? node?.examples ?? ""), kind: "n w"},
      {text: why ? `${why}${causes ? ` (${causes})` : ""}` : causes, kind: "long"},
    ]};
  });
  rows.sort((a, b) => a.rank - b.rank || order(a.name, b.name));
  section.hidden = !rows.length;
  const wrong = over ? 0 : rows.filter(row => row.rank < 3).length;
  const counted = more ? `${rows.length} of ${rows.length + more}` : String(rows.length);
  say(section.querySelector("h2 span"), `${counted}${wrong ? `, ${wrong} not well` : ""}`);
  fill(section.querySelector("tbody"), rows.map(row => [row.name, row.cells]));
}

// Rank (the worst first), word, kind and why.
function condition(site, node, over) {
  if (node?.refused) return [0, "refused", "bad", node.refused];
  if (!over && node?.status === "offline") return [1, "away", "warn", site?.why ?? ""];
  if (site && !["in", "waiting"].includes(site.state)) return [2, site.state, "warn", site.why];
  if (site?.state === "in") return [5, `in round ${site.last}`, "good", ""];
  if (node?.status === "registered") return [3, "never came", "", ""];
  if (node?.status === "offline") return [4, "away", "", ""];
  return [4, node ? "here" : "waits", "", ""];
}
