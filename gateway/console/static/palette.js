// A palette of commands, opened by Ctrl+K: each view adds its own.

import { h, put } from "./dom.js";

/** Open it. Commands are {name, keys, run}; a listener of the event "palette" adds to its `detail`. */
export function openPalette(own) {
  if (document.querySelector("dialog[open]")) return;
  const commands = [];
  document.dispatchEvent(new CustomEvent("palette", { detail: commands }));
  commands.push(...own);
  const input = h("input", { type: "text", role: "combobox", "aria-expanded": "true", "aria-controls": "palette-list", "aria-label": "Command", placeholder: "Type a command or the name of a chat", autocomplete: "off", spellcheck: "false" });
  const list = h("ul", { id: "palette-list", role: "listbox", "aria-label": "Commands" });
  const none = h("p", { class: "small muted none", role: "status", hidden: true }, "nothing found");
  const dialog = h("dialog", { class: "palette", "aria-label": "Commands", onclose: () => dialog.remove() }, input, list, none);
  let shown = [];
  let at = 0;
  const run = (command) => { dialog.close(); command.run(); };
  const mark = (index) => {
    at = Math.max(0, Math.min(shown.length - 1, index));
    [...list.children].forEach((each, place) => each.setAttribute("aria-selected", String(place === at)));
    input.setAttribute("aria-activedescendant", `command-${at}`);
    list.children[at]?.scrollIntoView({ block: "nearest" });
  };
  const draw = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = commands.filter(({ name }) => words.every((each) => name.toLowerCase().includes(each))).slice(0, 50);
    put(list, shown.map((command, place) => h("li", { id: `command-${place}`, role: "option", onclick: () => run(command), onpointermove: () => mark(place) }, h("span", { class: "ellipsis" }, command.name), command.keys && h("kbd", null, command.keys))));
    none.hidden = shown.length > 0;
    mark(0);
  };
  input.addEventListener("input", draw);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); mark(at + (event.key === "ArrowDown" ? 1 : -1)); }
    if (event.key === "Enter" && shown[at]) { event.preventDefault(); run(shown[at]); }
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  dialog.showModal();
  draw();
}
