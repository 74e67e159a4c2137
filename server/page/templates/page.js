// What the page knows, and how it is shown. Everything from the server is set as text, never as markup.
import {Chart} from "./chart.js";
import {sites} from "./sites.js";
import {Stream} from "./stream.js";
import {element, facts, fill, say} from "./tables.js";
import {four, lasting, moment, size, title, two} from "./words.js";

const $ = id => document.getElementById(id), asks = document.body.dataset.asks === "yes";
const OVER = ["finished", "failed", "stopped", "lost", "withdrawn"];
const KINDS = {running: "good", finished: "good", failed: "bad", lost: "bad", stopped: "warn", stopping: "warn"};
const SHOWN_ROUNDS = 60;

let hello = {}, token = sessionStorage.getItem("token") ?? "", waiting = false;
const runs = new Map(), here = new Map();
let key = "", run = blank();

function blank() { return {rounds: [], sites: new Map(), notes: [], state: {}}; }

// --- what comes

function merge(map, table) {
  for (const [name, row] of Object.entries(table.rows)) map.set(name, row);
  if (!table.order) return;
  const kept = table.order.filter(name => map.has(name)).map(name => [name, map.get(name)]);
  map.clear();
  for (const [name, row] of kept) map.set(name, row);
}

const stream = new Stream({
  hello(data) {
    hello = data;
    $("enter").close();
    link("");
    $("sign").hidden = !asks;
    $("sign").textContent = hello.user ? "Sign out" : "Sign in";
    say($("who"), hello.user ? `${hello.user} (${hello.role})` : "read-only");
    document.querySelector("main").hidden = false;
    draw();
  },
  news(data) {
    if ("run" in data) key = data.run;
    if (data.reset) run = blank();
    if (data.runs) merge(runs, data.runs);
    if (data.here) merge(here, data.here);
    if (data.rounds) run.rounds.push(...data.rounds);
    if (data.sites) merge(run.sites, data.sites);
    if (data.notes) run.notes = [...run.notes, ...data.notes].slice(-100);
    if (data.state) run.state = data.state;
    if ("silent" in data) run.silent = data.silent;
    link(run.silent ? `Not all is known: ${run.silent}` : "");
    draw();
  },
  end() { link("The server has ended. This is what it showed last; the page goes on if it comes back."); },
  out(data) { enter(data.why); },
  lost(why) { link(`Connection lost${why ? `: ${why}` : ""}. Trying again; what is below may be old.`); },
  refused(why) { enter(token ? why : ""); },
});

function link(text) {
  $("link").hidden = !text;
  say($("link"), text);
}

function open() {
  if (asks && !token) enter("");
  else stream.open(new URLSearchParams(location.hash.slice(1)).get("run") ?? "", token);
}

// --- who looks

function enter(why) {
  sessionStorage.removeItem("token");
  token = "";
  stream.close();
  document.querySelector("main").hidden = true;
  for (const name of ["error", "link", "state"]) $(name).hidden = true;
  for (const name of ["who", "about"]) say($(name), "");
  document.title = "Fedkeel";
  say($("title"), "Fedkeel");
  runs.clear(); here.clear(); run = blank(); key = ""; stream.last = "";
  say($("wrong"), why);
  if (!$("enter").open) $("enter").showModal();
}

$("enter").addEventListener("cancel", event => event.preventDefault());
$("enter").querySelector("form").addEventListener("submit", event => {
  event.preventDefault();
  token = $("token").value.trim();
  // Only what a header can hold.
  if (!/^[\x21-\x7e]+$/.test(token)) return say($("wrong"), "this is no token");
  $("token").value = "";
  sessionStorage.setItem("token", token);
  open();
});
$("sign").addEventListener("click", () => enter(""));
addEventListener("hashchange", open);

// --- buttons

function may(row, action) {
  const own = hello.role === "operate" || (hello.role === "submit" && row.owner === hello.user);
  return own && hello.actions.includes(action);
}

function buttons(name, row) {
  const found = [];
  if (may(row, "stop") && ["waiting", "starting", "running"].includes(row.status))
    found.push({text: row.status === "waiting" ? "Take out" : "Stop", onclick: () => ask(name, "stop")});
  if (may(row, "resume") && ["failed", "stopped", "finished", "lost"].includes(row.status))
    found.push({text: "Resume", onclick: () => ask(name, "resume")});
  return found;
}

function ask(name, action) {
  const row = runs.get(name), dialog = $("ask"), [no, yes] = dialog.querySelectorAll("button");
  const words = {
    stop: row.status === "waiting" ? ["Take out", "It leaves the queue and does not begin."]
      : ["Stop", "The round in hand is finished or void, a checkpoint is kept, and the run can be resumed."],
    resume: ["Resume", "It waits in the queue and goes on from its newest checkpoint."],
  }[action];
  say(dialog.querySelector("h2"), `${words[0]} ${row.name}?`);
  say(dialog.querySelector("p"), `${words[1]} The audit log will say that ${hello.user} asked for it.`);
  say(yes, words[0]);
  no.onclick = () => dialog.close();
  yes.onclick = async () => {
    dialog.close();
    let why = "";
    try {
      const answer = await fetch(`runs/${encodeURIComponent(name)}/${action}`,
        {method: "POST", headers: {Authorization: `Bearer ${token}`}});
      if (!answer.ok) why = (await answer.json().catch(() => ({}))).detail ?? `HTTP ${answer.status}`;
    } catch { why = "the server cannot be reached"; }
    run.fault = why && `${words[0]} ${row.name}: ${why}`;
    draw();
  };
  dialog.showModal();
  no.focus();
}

// --- what is shown

const charts = [four, four, four, value => `${two(value)} s`].map((format, index) =>
  new Chart(document.querySelector(".charts"), "", format, index === 3));

function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; show(); });
}

function show() {
  if (!hello.role || document.querySelector("main").hidden) return;
  const row = runs.get(key) ?? {}, {rounds, state} = run, last = rounds.at(-1);
  const status = row.status ?? "", name = row.name ?? "Fedkeel", planned = state.rounds ?? row.rounds ?? 0;
  const done = last?.[0] ?? row.round ?? 0;
  say($("title"), name);
  document.title = key ? `${planned ? `${done}/${planned} ` : ""}${name}` : "Fedkeel";
  pill(status);
  const told = [state.algorithm, state.task, row.folder].filter(Boolean).join(" · ");
  say($("about"), key ? told : runs.size ? "There is no such run here." : "Nothing runs here yet.");
  const error = [row.error || state.error, run.fault].filter(Boolean).join("\n");
  $("error").hidden = !error;
  say($("error"), error);
  $("now").hidden = !key;
  $("bar").setAttribute("aria-valuemax", planned || 1);
  $("bar").setAttribute("aria-valuenow", done);
  $("bar").firstElementChild.style.width = `${planned ? Math.min(100, 100 * done / planned) : 0}%`;
  facts($("facts"), numbers(rounds, state, status, planned, done));
  acts(row);
  queue();
  curves(rounds, state, planned);
  sites($("sites"), run.sites, here, OVER.includes(status), state.more_sites);
  table(rounds, state);
  $("notes").hidden = !run.notes.length;
  notes();
}

function pill(status) {
  $("state").hidden = !status;
  $("state").className = `pill ${KINDS[status] ?? ""}`;
  say($("state"), status);
}

function numbers(rounds, state, status, planned, done) {
  const last = rounds.at(-1) ?? [], evaluated = rounds.findLast(point => point[1] != null);
  const recent = rounds.slice(-10).map(point => point[4]).filter(value => value != null).sort((a, b) => a - b);
  const each = recent[recent.length >> 1], losses = rounds.findLast(point => point[2] != null) ?? rounds.findLast(point => point[3] != null);
  return [
    ["Round", planned ? `${done} / ${planned}` : String(done)],
    [title(state.metric), evaluated ? four(evaluated[1]) : ""],
    [losses?.[2] == null ? "Training loss" : "Loss", losses ? four(losses[2] ?? losses[3]) : ""],
    ["Clients", last.length ? `${last[5]} / ${last[6]}` : ""],
    ["A round", each == null ? "" : each < 60 ? `${two(each)} s` : lasting(each)],
    ["Left, about", status === "running" && each != null && planned > done ? lasting(each * (planned - done)) : ""],
    ["Waits for", state.waiting?.length ? state.waiting.join(", ") : ""],
  ];
}

function acts(row) {
  const found = buttons(key, row), is = found.map(button => button.text).join();
  if ($("buttons").is === is) return;
  $("buttons").is = is;
  $("buttons").replaceChildren(...found.map(button =>
    element("button", {type: "button", className: button.text === "Stop" ? "danger" : "", ...button})));
}

function queue() {
  $("runs").hidden = runs.size < 2 && !hello.actions.includes("resume") && !runs.get(key)?.queue;
  fill($("runs").querySelector("tbody"), [...runs].map(([name, row]) => [name, [
    {text: row.name, kind: "name", href: `#run=${encodeURIComponent(name)}`, title: `${row.queue} ${row.id ?? ""} ${row.folder}`},
    {text: row.status, pill: KINDS[row.status] ?? "", title: row.error ?? ""},
    {text: row.rounds ? `${row.round ?? 0} / ${row.rounds}` : String(row.round || ""), kind: "n"},
    {...moment(row.since), kind: "w"},
    {text: row.owner, kind: "w"},
    {buttons: name === key ? [] : buttons(name, row)},
  ]]), key);
}

function curves(rounds, state, planned) {
  const series = [[title(state.metric), 1], ["Loss", 2], ["Training loss", 3], ["Seconds a round", 4]];
  const found = series.map(([, index]) => rounds.filter(p => p[index] != null).map(p => [p[0], p[index]]));
  $("curves").hidden = !found.some(points => points.length);
  charts.forEach((chart, index) => chart.show(series[index][0], found[index], planned));
}

function table(rounds, state) {
  $("rounds").hidden = !rounds.length;
  say($("metric"), title(state.metric));
  $("rounds").classList.toggle("one", state.metric === "loss");
  fill($("rounds").querySelector("tbody"), rounds.slice(-SHOWN_ROUNDS).reverse().map(point => {
    const [round, value, loss, train, seconds, accepted, sampled, down, up, voids, time, drops] = point;
    const told = (drops ?? []).map(([cause, names, count]) =>
      `${cause}: ${names.join(", ")}${count > names.length ? ` and ${count - names.length} more` : ""}`);
    if (voids) told.unshift(`${voids} void`);
    return [round, [
      {text: String(round), kind: "n", title: time}, {text: four(value), kind: "n"}, {text: four(loss), kind: "n"}, {text: four(train), kind: "n w"},
      {text: `${accepted} / ${sampled}`, kind: "n"}, {text: size(down), kind: "n w"}, {text: size(up), kind: "n w"},
      {text: two(seconds), kind: "n"}, {text: told.join("; "), kind: "long"},
    ]];
  }));
}

function notes() {
  const list = $("notes").querySelector("ol"), last = run.notes.at(-1);
  if (list.count === run.notes.length && list.last === last) return;
  [list.count, list.last] = [run.notes.length, last];
  list.replaceChildren(...run.notes.slice().reverse().map(note => {
    const [, time, text] = /^(\d{4}-\S+Z) (.*)$/s.exec(note) ?? [null, "", note];
    const at = moment(time);
    return element("li", {}, ...(time ? [element("time", {text: at.text, dateTime: time, title: time})] : []), text);
  }));
}

open();
