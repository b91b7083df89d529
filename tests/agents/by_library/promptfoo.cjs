// Prompts and tools of Promptfoo: each test is a turn, with the turns before it as its history.
const { readFileSync, writeFileSync } = require("node:fs");

const call = (id, name, given) => ({
  role: "assistant",
  content: null,
  tool_calls: [{ id, type: "function", function: { name, arguments: JSON.stringify(given) } }],
});
const result = (tool_call_id, content) => ({ role: "tool", tool_call_id, content });

function prompt({ vars: { wish, path, turn } }) {
  const turns = [
    [call("call_1", "write_file", { path, content: "walnut\n" }), result("call_1", "written")],
    [call("call_2", "read_file", { path }), result("call_2", turn > 1 && readFileSync(path, "utf8"))],
  ];
  return [{ role: "user", content: wish }, ...turns.slice(0, turn).flat()];
}

const given = (text) => (typeof text === "string" ? JSON.parse(text) : text);

function writeFile(text) {
  writeFileSync(given(text).path, given(text).content);
  return "written";
}

const readFile = (text) => readFileSync(given(text).path, "utf8");

module.exports = { prompt, writeFile, readFile };
