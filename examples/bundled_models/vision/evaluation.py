"""Exact-match evaluation of the vision model, on pictures of its own drawer and of another.

    python -m examples.bundled_models.vision.evaluation models/tiny-vision

prints the table of the model's card.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from nano_inference.text.images import ImageProcessor

from ..evaluation import Model
from ..examples import Split
from ..tokenizer import FastTokenizer, chat_text, encode
from .other_pictures import draw_otherwise
from .pictures import draw, make_scene
from .questions import TASKS, Question, question
from .settings import VisionSettings


class Case(NamedTuple):
    """A held-out picture with one question."""

    image: Image.Image
    question: Question


def cases(
    task: str, count: int, seed: int, split: Split = "heldout", *, otherwise: bool = False
) -> list[Case]:
    """Return pictures of a split with a question of a task each.

    Args:
        otherwise: Draw the same scenes by the other drawer.
    """
    rng = random.Random(f"{task}/{split}/{seed}")
    other_rng = random.Random(f"{task}/{split}/{seed}/otherwise")
    found: list[Case] = []
    while len(found) < count:
        scene = make_scene(rng, split)
        if (asked := question(scene, task, rng)) is not None:
            if task == "number" and not asked.answer.isdigit():
                continue
            image = draw(scene, rng)
            found.append(Case(draw_otherwise(scene, other_rng) if otherwise else image, asked))
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
        "| task | question | answer | pictures | right, own drawer | right, other drawer |",
        "|---|---|---|---:|---:|---:|",
    ]
    for task in TASKS:
        own, other = (
            cases(task, settings.heldout, settings.seed, otherwise=otherwise)
            for otherwise in (False, True)
        )
        example = own[0].question
        right = [evaluate(model, processor, each) for each in (own, other)]
        shares = " | ".join(f"{number / len(own):.0%}" for number in right)
        lines.append(f"| {task} | `{example.text}` | `{example.answer}` | {len(own)} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Print the results of a model's folder."""
    parser = argparse.ArgumentParser(description="Evaluate the bundled vision model.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    settings = VisionSettings()
    torch.set_num_threads(settings.threads)
    found = ImageProcessor.of(folder)
    assert found is not None, "the folder has a processor"
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    print(table(settings, model, found._processor))


if __name__ == "__main__":
    main()
