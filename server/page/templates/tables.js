// Tables whose rows have keys: only what differs is touched, so that nothing flickers and a selection stays.
export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  const {text, ...rest} = options;
  if (text !== undefined) made.textContent = text;
  Object.assign(made, rest);
  made.append(...children);
  return made;
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// rows: [key, cells]; a cell is a text or {text, kind, title, pill, href, buttons}.
export function fill(body, rows, current) {
  const before = body.known ??= new Map(), now = new Map();
  let place = body.firstChild;
  for (const [key, cells] of rows) {
    const row = before.get(key) ?? element("tr");
    now.set(key, row);
    cells.forEach((cell, index) => set(row.cells[index] ?? row.insertCell(), cell));
    if (key === current) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
    if (row === place) place = place.nextSibling; else body.insertBefore(row, place);
  }
  for (const [key, row] of before) if (!now.has(key)) row.remove();
  body.known = now;
}

function set(node, cell) {
  const {text = "", kind = "", title = "", pill, href, buttons} = typeof cell === "object" ? cell : {text: cell};
  const is = JSON.stringify([text, kind, title, pill, href, buttons?.map(button => button.text)]);
  if (node.is === is) return;
  node.is = is;
  node.className = kind;
  node.title = title;
  if (buttons) node.replaceChildren(...buttons.map(button => element("button", {type: "button", ...button})));
  else if (pill !== undefined) node.replaceChildren(element("span", {text, className: `pill ${pill}`}));
  else if (href) node.replaceChildren(element("a", {text, href}));
  else node.textContent = text;
}

// pairs: name and value, always the same number of them; one without a value is hidden.
export function facts(list, pairs) {
  const known = list.known ??= new Map();
  pairs.forEach(([name, value], index) => {
    if (!known.has(index)) {
      const [label, found] = [element("dt"), element("dd")];
      list.append(element("div", {}, label, found));
      known.set(index, [label, found]);
    }
    const [label, found] = known.get(index);
    say(label, name);
    say(found, value);
    found.parentNode.hidden = value === "";
  });
}
