// Conversations, kept in this browser (IndexedDB), and the tree of turns that each side of one has.

const MOST_SEARCHED = 100_000;

let opened = null;
const memory = new Map();

/** The database; null where the browser keeps none, as in some private windows. */
function database() {
  return (opened ??= new Promise((resolve) => {
    let request;
    try { request = indexedDB.open("console", 1); } catch { resolve(null); return; }
    request.onupgradeneeded = () => { for (const name of ["heads", "conversations"]) request.result.createObjectStore(name, { keyPath: "id" }); };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  }));
}

async function inStores(mode, work) {
  const found = await database();
  if (!found) return undefined;
  const transaction = found.transaction(["heads", "conversations"], mode);
  const request = work(transaction.objectStore("heads"), transaction.objectStore("conversations"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("the browser's storage failed"));
  });
}

export const kept = {
  lasts: async () => Boolean(await database()),
  /** {id, title, updated, words} of each, the newest first. */
  list: async () => ((await inStores("readonly", (heads) => heads.getAll())) ?? [...memory.values()].map(headOf)).sort((one, other) => other.updated - one.updated),
  read: async (id) => (await inStores("readonly", (_, all) => all.get(id))) ?? memory.get(id),
  write: async (conversation) => {
    if (!(await database())) { memory.set(conversation.id, conversation); return; }
    await inStores("readwrite", (heads, all) => { heads.put(headOf(conversation)); all.put(conversation); });
  },
  remove: async (id) => { memory.delete(id); await inStores("readwrite", (heads, all) => { heads.delete(id); all.delete(id); }); },
};

const turnsOf = (node) => node.children.flatMap((each) => [each, ...turnsOf(each)]);
const wordsOf = (turn) => turn.answer?.text ?? turn.text ?? "";

/** All turns of a conversation, those of other branches included. */
export const allTurns = (conversation) => conversation.panes.flatMap((pane) => turnsOf(pane.root));

function headOf(conversation) {
  const { id, updated } = conversation;
  const words = `${titleOf(conversation)} ${allTurns(conversation).map(wordsOf).join(" ")}`.slice(0, MOST_SEARCHED).toLowerCase();
  return { id, updated, title: titleOf(conversation), words };
}

/** The first line of a text, without Markdown's marks. */
const plain = (text) => (text.split("\n").map((line) => line.replace(/^(\s*(>|#+\s|[-*+]\s))+|```\w*/g, "").replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/(?<![\w*])(\*\*|~~|`|\*)(\S.*?)\1(?!\w)/g, "$2").trim()).find(Boolean) ?? "").slice(0, 80);

export const titleOf = (conversation) => conversation.title || (plain(wordsOf(path(conversation.panes[0])[0] ?? { text: "New chat" })) || "A picture or a file");

// --- the tree -----------------------------------------------------------------------------------
// A turn has `children`: what has followed it, an edited or regenerated turn beside the first one. `shown` is the one shown.

const nameOf = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export const newRoot = () => ({ children: [], shown: 0 });

export const newConversation = (settings) => ({ id: nameOf(), title: "", updated: Date.now(), compare: false, panes: settings.map((each) => ({ settings: structuredClone(each), root: newRoot() })) });

/** The shown turns, the first one first. */
export function path(pane) {
  const found = [];
  for (let turn = pane.root; (turn = turn.children[turn.shown]); ) found.push(turn);
  return found;
}

/** Add a turn after another one, and show it. */
export function follow(parent, turn) {
  const added = { ...turn, children: [], shown: 0 };
  parent.shown = parent.children.push(added) - 1;
  return added;
}

/** The turn before this one; the root of the first. */
export function parentOf(pane, turn) {
  const found = path(pane);
  return found[found.indexOf(turn) - 1] ?? pane.root;
}

/** Copy the shown turns of one side after a root, up to a turn, that one included; without one, all that are complete. */
export function copyTurns(pane, root, last = null) {
  let end = root;
  const turns = path(pane);
  const running = turns.findIndex((turn) => turn.answer && !turn.answer.done);
  const until = last ? turns.indexOf(last) + 1 : running < 0 ? turns.length : Math.max(0, running - 1);
  for (const { children, shown, ...own } of turns.slice(0, until)) end = follow(end, structuredClone(own));
}

/** A copy of a conversation up to a turn of one side. */
export function branch(conversation, pane, turn) {
  const made = newConversation(conversation.panes.map((each) => each.settings));
  const side = made.panes[0];
  side.settings = structuredClone(pane.settings);
  copyTurns(pane, side.root, turn);
  made.title = `${titleOf(conversation)} (branch)`;
  return made;
}
