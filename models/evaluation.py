"""How many examples the model answers rightly."""

from collections.abc import Iterable
from typing import Any

import torch

from . import tasks
from .card import SAMPLES, Result
from .settings import Settings
from .tokenizer import FastTokenizer, encode, prompt_text

Example = tasks.Example
Kind = tuple[str, tasks.Form]

SAMPLED = ("add2", "sub2")
"""The tasks that are measured at temperature 1 too."""

# The annotations of Transformers do not pass mypy's strict mode, so models and tokenizers are Any.
Model = Any


def kinds_of(*names: str) -> list[Kind]:
    """Return the kinds of examples of some tasks, of each all forms."""
    return [(task, form) for task in names for form in tasks.forms(task)]


def distinct(kind: Kind, split: tasks.Split, count: int, seed: int) -> list[Example]:
    """Return up to ``count`` different examples of a kind."""
    task, form = kind
    return tasks.distinct(
        task, split, count, seed, chat=form == "chat", thinking=form == "thinking"
    )


@torch.no_grad()
def evaluate(
    model: Model,
    tokenizer: FastTokenizer,
    examples: Iterable[Example],
    *,
    sample: bool = False,
    padding: int = 0,
) -> int:
    """Return how many of the examples the model answers exactly, greedy or at temperature 1.

    Prompts of the same length go together, or of lengths that differ by up to ``padding`` tokens.
    """
    model.eval()
    groups: dict[int, list[tuple[Example, list[int]]]] = {}
    for example in examples:
        ids = encode(tokenizer, prompt_text(tokenizer, example))
        groups.setdefault(len(ids) // (padding + 1), []).append((example, ids))
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {}
    right = 0
    for _, group in sorted(groups.items()):
        longest = max(len(encode(tokenizer, example.answer)) for example, _ in group)
        length = max(len(ids) for _, ids in group)
        pad = tokenizer.pad_token_id
        prompts = torch.tensor([[pad] * (length - len(ids)) + ids for _, ids in group])
        output = model.generate(
            input_ids=prompts,
            attention_mask=(prompts != pad).long(),
            max_new_tokens=longest + 2,
            **how,
        )
        for (example, _), ids in zip(group, output.tolist(), strict=True):
            text = tokenizer.decode(ids[length:], skip_special_tokens=True)
            right += tasks.grade(example, text)
    model.train()
    return right


def measure(settings: Settings, model: Model, tokenizer: FastTokenizer) -> list[Result]:
    """Evaluate every kind of example on held-out prompts."""
    results = []
    torch.manual_seed(settings.seed)
    for kind in kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS):
        task, form = kind
        count = settings.heldout if task in tasks.TASKS else settings.heldout_chats
        prompts = distinct(kind, "heldout", count, settings.seed)
        prompts = [example for example in prompts if not tasks.is_quoted(example)]
        greedy = evaluate(model, tokenizer, prompts, padding=40)
        sampled = None
        if task in SAMPLED:
            sampled = evaluate(model, tokenizer, prompts * SAMPLES, sample=True, padding=40)
        results.append(Result(task, form, len(prompts), greedy, sampled))
    return results
