// What to try first, by the model that is served.

import { h } from "./dom.js";
import { EXAMPLE_TOOLS } from "./request.js";

const WEATHER = ["What is the weather in Oslo and Paris?", { tools: EXAMPLE_TOOLS }];

const TINY = [["How much is 6 + 6?"], ["Turn into JSON: Ben is a pilot, 44 years old."], WEATHER, ["Tell a story about Iris, a parrot and a green hat."]];
const TINY_VISION = [["What is in the picture?"], ["How many circles are there?"], ["Which shape is blue?"]];
const VISION = [["What is in this picture?"], ["Where is each shape, and which colour has it? Answer as a table."]];
const ANY = [["Explain in five sentences why the sky is blue."], ["Write a Python function that merges two sorted lists, with a test."], ["Compare TCP and UDP in a table."]];

/** [the message, settings that go with it, whether it is about the sample picture] of each. */
export function examplesFor(model) {
  const pictures = model?.images ? (model.bundled ? TINY_VISION : VISION).map(([text]) => [text, {}, true]) : [];
  const texts = model?.bundled ? (model.images ? [] : TINY) : [...ANY, ...(model?.tools ? [WEATHER] : [])];
  // A small model is sure of little: at temperature 0 its examples go well.
  const fixed = model?.bundled ? { temperature: "0" } : {};
  return [...pictures, ...texts].slice(0, 5).map(([text, more = {}, picture = false]) => [text, { ...more, ...fixed }, picture]);
}

/** A picture of three shapes, as a data URL. */
export function samplePicture() {
  const side = 192;
  const canvas = h("canvas", { width: side, height: side });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "#fff";
  brush.fillRect(0, 0, side, side);
  brush.fillStyle = "rgb(220 30 30)";
  brush.beginPath();
  brush.arc(32, 32, 24, 0, 7);
  brush.fill();
  brush.fillStyle = "rgb(40 80 230)";
  brush.fillRect(136, 72, 48, 48);
  brush.fillStyle = "rgb(30 160 50)";
  brush.beginPath();
  brush.moveTo(96, 136);
  brush.lineTo(122, 184);
  brush.lineTo(70, 184);
  brush.fill();
  return canvas.toDataURL("image/png");
}
