// Numbers, sizes and times for people.
export const four = value => value == null ? "–" : Math.abs(value) >= 1e5 ? value.toExponential(3) : value.toFixed(4);
export const two = value => value == null ? "–" : value.toFixed(2);

export function size(bytes) {
  if (bytes == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 4; unit++) bytes /= 1000;
  return `${bytes.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export function lasting(seconds) {
  if (!(seconds >= 0)) return "";
  const all = Math.round(seconds), [h, m, s] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

export function moment(text) {
  if (!text || text === "now") return {text: text ?? "", title: ""};
  const at = new Date(/^[\d.]+$/.test(text) ? 1000 * text : text);
  if (isNaN(at)) return {text, title: ""};
  const today = at.toDateString() === new Date().toDateString();
  return {text: today ? at.toLocaleTimeString("en-GB") : at.toLocaleString("sv-SE").slice(0, 16), title: text};
}

export function title(metric = "") { return metric.slice(0, 1).toUpperCase() + metric.slice(1).replaceAll("_", " "); }
