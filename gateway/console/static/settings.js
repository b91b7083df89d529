// The settings of a side's calls, with errors at the field that they are of.

import { check, field, h } from "./dom.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS } from "./request.js";

const REASONING = [["", "the model's default"], ["none", "off"], ["low", "low"], ["medium", "medium"], ["high", "high"]];
const FORMATS = [["text", "text"], ["json_object", "JSON"], ["json_schema", "JSON by a schema"]];
const TOOL_CHOICES = [["auto", "the model decides"], ["required", "must call"], ["none", "must not call"]];

/** Return the fields. `problems`: messages by the name of a setting; `kept(name)` is called after a change. */
export function settingsForm(settings, problems, { models, byDefault }, kept) {
  const labelled = (name, label, control, ...more) => {
    const problem = problems[name] && h("p", { class: "small error", role: "alert", id: `problem-${name}` }, problems[name]);
    if (problem) { control.setAttribute("aria-invalid", "true"); control.setAttribute("aria-describedby", problem.id); }
    control.dataset.setting = name;
    control.addEventListener("input", () => {
      settings[name] = control.value;
      delete problems[name];
      control.removeAttribute("aria-invalid");
      problem?.remove();
      kept(name);
    });
    const made = field(label, control);
    if (problem) made.append(problem);
    made.append(...more.filter(Boolean));
    return made;
  };
  const input = (name, label, placeholder) => labelled(name, label, h("input", { value: settings[name], placeholder, inputmode: "decimal", spellcheck: "false", autocomplete: "off" }));
  const area = (name, label, rows, ...more) => labelled(name, label, h("textarea", { class: "code", rows, value: settings[name], spellcheck: "false" }), ...more);
  const choice = (name, label, options) => {
    const select = h("select", null, options.map(([value, text]) => h("option", { value }, text)));
    select.value = settings[name];
    return labelled(name, label, select);
  };
  const example = (name, text) => !settings[name].trim() && h("button", { type: "button", class: "quiet small", onclick: () => { settings[name] = text; delete problems[name]; kept("format"); } }, "Use an example");
  return [
    choice("model", "Model", [["", byDefault ? `default (${byDefault})` : "default"], ...models.map((each) => [each.id, each.parent ? `${each.id} · adapter of ${each.parent}` : each.id])]),
    labelled("system", "System prompt", h("textarea", { rows: 3, value: settings.system, placeholder: "None" })),
    h("div", { class: "two" },
      input("temperature", "Temperature", "1"), input("max_tokens", "Max tokens", "to the end"),
      input("top_p", "top_p", "1, off"), input("top_k", "top_k", "0, off"),
      input("seed", "Seed", "random"), input("repetition_penalty", "Repetition penalty", "1, off"),
      input("presence_penalty", "Presence penalty", "0"), input("frequency_penalty", "Frequency penalty", "0")),
    area("stop", "Stop strings, one per line", 1),
    choice("reasoning", "Reasoning", REASONING),
    check("Probabilities of each token", settings.logprobs, (value) => { settings.logprobs = value; kept("logprobs"); }),
    h("hr"),
    choice("format", "Answer as", FORMATS),
    settings.format === "json_schema" && area("schema", "JSON schema", 8, example("schema", EXAMPLE_SCHEMA)),
    h("details", { open: Boolean(settings.tools || problems.tools) }, h("summary", null, "Tools"), h("div", null,
      area("tools", "Functions, as OpenAI's tools", 7, example("tools", EXAMPLE_TOOLS)),
      choice("tool_choice", "Choice", TOOL_CHOICES))),
  ];
}
