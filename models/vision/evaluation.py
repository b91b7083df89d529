"""Exact-match evaluation of the vision model."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from PIL import Image

from ..evaluation import Model
from ..examples import Split
from ..tokenizer import FastTokenizer, chat_text, encode
from .pictures import draw, make_scene
from .questions import TASKS, Question, question
from .settings import VisionSettings


class Case(NamedTuple):
    """A held-out picture with one question."""

    image: Image.Image
    question: Question


def cases(task: str, count: int, seed: int, split: Split = "heldout") -> list[Case]:
    """Return pictures of a split with a question of a task each."""
    rng = random.Random(f"{task}/{split}/{seed}")
    found: list[Case] = []
    while len(found) < count:
        scene = make_scene(rng, split)
        if (asked := question(scene, task, rng)) is not None:
            if task == "number" and not asked.answer.isdigit():
                continue
            found.append(Case(draw(scene, rng), asked))
    return found


def prompt_of(tokenizer: FastTokenizer, text: str) -> str:
    """Return the chat before the answer to a question about one picture."""
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return chat_text(tokenizer, [{"role": "user", "content": content}])


@torch.no_grad()
def evaluate(model: Model, processor: Any, asked: list[Case]) -> int:
    """Return the number of exactly right greedy answers."""
    model.eval()
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"
    inputs = processor(
        text=[prompt_of(tokenizer, case.question.text) for case in asked],
        images=[case.image for case in asked],
        padding=True,
        return_tensors="pt",
    )
    inputs.pop("token_type_ids", None)
    longest = max(len(encode(tokenizer, case.question.answer)) for case in asked)
    output = model.generate(**inputs, max_new_tokens=longest + 2)
    texts = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    model.train()
    return sum(text == case.question.answer for text, case in zip(texts, asked, strict=True))


def table(settings: VisionSettings, model: Model, processor: Any) -> str:
    """Return the held-out results as a Markdown table, with an example of each task."""
    lines = [
        "| task | question | answer | held-out pictures | right | share |",
        "|---|---|---|---:|---:|---:|",
    ]
    for task in TASKS:
        asked = cases(task, settings.heldout, settings.seed)
        right, example = evaluate(model, processor, asked), asked[0].question
        lines.append(
            f"| {task} | `{example.text}` | `{example.answer}` | {len(asked)} | {right} "
            f"| {right / len(asked):.1%} |"
        )
    return "\n".join(lines)
