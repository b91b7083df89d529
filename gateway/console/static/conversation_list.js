// The list of conversations that this browser keeps, with a search over their texts.

import { h, icon, ICONS, put, toast } from "./dom.js";
import { readExport } from "./files.js";
import { newSettings } from "./request.js";

const DAY_MS = 86_400_000;
const MOST_SHOWN = 300;

function groupOf(updated) {
  const today = new Date().setHours(0, 0, 0, 0);
  return updated >= today ? "Today" : updated >= today - DAY_MS ? "Yesterday" : updated >= today - 7 * DAY_MS ? "The last week" : "Before";
}

/** The list: its element, and how it is drawn, opened and closed where the page is narrow. */
export function drawConversations(does) {
  const search = h("input", { type: "search", placeholder: "Search chats", "aria-label": "Search chats", oninput: () => redraw() });
  const rows = h("div", { class: "chat-rows" });
  const file = h("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "Import a chat" });
  const all = h("button", { type: "button", class: "quiet small", onclick: () => does.removeAll() }, "Delete all");
  const element = h("section", { class: "chats", "aria-label": "Chats" },
    h("div", { class: "row nowrap" }, search, h("button", { type: "button", class: "quiet icon only-phone", "aria-label": "Close the chats", onclick: () => close() }, icon(ICONS.close))),
    rows,
    h("div", { class: "row chat-end" }, h("button", { type: "button", class: "quiet small", onclick: () => file.click() }, "Import"), file, all));
  let heads = [];
  let current = "";
  const close = () => element.classList.remove("shown");
  element.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  file.addEventListener("change", async () => {
    try {
      const { turns, settings } = await readExport(file.files[0], newSettings());
      does.imported(turns, settings);
      close();
    } catch (error) { toast(error.message, true); }
    file.value = "";
  });

  function redraw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = heads.filter((each) => words.every((word) => each.words.includes(word))).slice(0, MOST_SHOWN);
    const shown = [];
    let group = "";
    for (const each of found) {
      if (groupOf(each.updated) !== group) shown.push(h("h3", null, (group = groupOf(each.updated))));
      shown.push(h("div", { class: "chat-row", data: { current: String(each.id === current) } },
        h("button", { type: "button", class: "quiet ellipsis", title: each.title, "aria-current": each.id === current && "true", onclick: () => does.open(each.id) }, each.title),
        h("button", { type: "button", class: "quiet icon", title: "Rename, export or delete", "aria-label": `Rename, export or delete ${each.title}`, onclick: () => does.about(each.id) }, icon(ICONS.more))));
    }
    put(rows, shown.length ? shown : h("p", { class: "small muted" }, heads.length ? "No chat has these words" : "Chats are kept in this browser"));
    all.hidden = !heads.length;
  }

  return {
    element,
    close,
    draw: (list, id) => { heads = list; current = id; redraw(); },
    toggle: () => { element.classList.toggle("shown"); if (element.classList.contains("shown")) search.focus(); },
    focus: () => { element.classList.add("shown"); search.focus(); },
  };
}
