// Elements by code. Text is always a text node, never HTML, whatever a prompt or a model says.

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "indeterminate", "multiple"]);

function apply(element, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false && !PROPERTIES.has(name)) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") for (const [key, each] of Object.entries(value)) element.dataset[key] = each;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

function fill(element, children) {
  for (const each of children.flat(Infinity)) {
    if (each === undefined || each === null || each === false) continue;
    element.append(each instanceof Node ? each : document.createTextNode(String(each)));
  }
  return element;
}

/** Return an element: its tag, properties and children. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  apply(element, props);
  return fill(element, children);
}

const within = (space) => (tag, props, ...children) => {
  const element = document.createElementNS(space, tag);
  apply(element, props);
  return fill(element, children);
};

/** As `h`, for SVG and for MathML. */
export const svg = within("http://www.w3.org/2000/svg");
export const math = within("http://www.w3.org/1998/Math/MathML");

/** Replace an element's children. */
export function put(element, ...children) {
  element.replaceChildren();
  return fill(element, children);
}

export function icon(path) {
  return svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: path }));
}

export const ICONS = {
  image: "M3 4h14v12H3zM3 13l4-4 4 4 2-2 4 3M12.5 7.5h.01",
  settings: "M3 6h8m4 0h2M3 14h2m4 0h8M13 4v4M7 12v4",
  split: "M3 4h14v12H3zM10 4v12",
  code: "M7 6l-4 4 4 4M13 6l4 4-4 4",
  close: "M5 5l10 10M15 5L5 15",
  fresh: "M10 4v12M4 10h12",
  list: "M4 6h12M4 10h12M4 14h8",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  attach: "M15.5 9.5l-5.6 5.6a3.6 3.6 0 01-5-5L11 4a2.4 2.4 0 013.4 3.4l-6 6a1.2 1.2 0 01-1.7-1.7l5.5-5.5",
  copy: "M7 7h9v9H7zM13 7V4H4v9h3",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11.5 5.5l3 3",
  again: "M16 10a6 6 0 11-2-4.5M16 3v3.5h-3.5",
  branch: "M6 7v6M6 7a1.8 1.8 0 100-3.6A1.8 1.8 0 006 7zm0 9.6A1.8 1.8 0 106 13a1.8 1.8 0 000 3.6zM14 7a1.8 1.8 0 100-3.6A1.8 1.8 0 0014 7zm0 0c0 4-8 2-8 6",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  end: "M10 4v11M5 10.5l5 5 5-5",
};

let fields = 0;

/** Return a labelled control. */
export function field(label, control, hint) {
  control.id ||= `f${++fields}`;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, hint && h("p", { class: "small muted" }, hint));
}

export function check(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return h("label", { class: "check" }, box, label);
}

/** Show a message for some seconds; screen readers say it. */
export function toast(text, bad = false) {
  const element = h("div", { class: bad ? "toast bad" : "toast" }, text);
  const all = document.getElementById("toasts");
  // At most two, each once.
  [...all.children].filter((each, at, { length }) => each.textContent === text || at < length - 1).forEach((each) => each.remove());
  all.append(element);
  setTimeout(() => element.remove(), bad ? 9000 : 4000);
}

/** Ask for a confirmation; resolves to whether it was given. */
export function confirmed(title, text, action) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": title, onclose: () => { resolve(dialog.returnValue === "yes"); dialog.remove(); } },
      h("form", { method: "dialog" }, h("h2", null, title), h("p", { class: "muted" }, text),
        h("div", { class: "row end" }, h("button", { type: "submit", value: "no", class: "quiet" }, "Cancel"), h("button", { type: "submit", value: "yes", class: "danger" }, action))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Open a dialog with this content. */
export function showDialog(title, ...content) {
  const dialog = h("dialog", { class: "wide", "aria-label": title, onclose: () => dialog.remove() },
    h("div", { class: "stack" }, h("div", { class: "row" }, h("h2", null, title)), content,
      h("div", { class: "row end" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser did not allow copying; select the text instead", true);
  }
}
