"""Exact-match evaluation of the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import tasks
from .examples import Example, Form
from .settings import TrainingSettings
from .tokenizer import FastTokenizer, encode, prompt_text

Kind = tuple[str, Form]

SAMPLES = 4
"""Samples of each prompt at temperature 1."""

# The annotations of Transformers do not pass mypy's strict mode, so models and tokenizers are Any.
Model = Any


@dataclass(frozen=True)
class Result:
    """The number of right answers among the held-out examples of one kind."""

    task: str
    form: str
    count: int
    greedy: int
    sampled: int | None  # Right answers in SAMPLES samples of each prompt; None: not measured.


def kinds_of(*names: str) -> list[Kind]:
    """Return the kinds of examples of some tasks, each task in all its forms."""
    return [(task, form) for task in names for form in tasks.forms(task)]


@torch.no_grad()
def evaluate(
    model: Model,
    tokenizer: FastTokenizer,
    examples: Iterable[Example],
    *,
    sample: bool = False,
    padding: int = 0,
) -> int:
    """Return the number of exactly right answers, greedy or at temperature 1.

    Prompts whose lengths differ by up to `padding` tokens share a batch.
    """
    model.eval()
    groups: dict[int, list[tuple[Example, list[int]]]] = {}
    for example in examples:
        ids = encode(tokenizer, prompt_text(tokenizer, example))
        groups.setdefault(len(ids) // (padding + 1), []).append((example, ids))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {}
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
            **options,
        )
        for (example, _), ids in zip(group, output.tolist(), strict=True):
            text = tokenizer.decode(ids[length:], skip_special_tokens=True)
            right += tasks.grade(example, text)
    model.train()
    return right


def measure(settings: TrainingSettings, model: Model, tokenizer: FastTokenizer) -> list[Result]:
    """Evaluate every kind of example on held-out prompts; two-digit results are also sampled."""
    results = []
    torch.manual_seed(settings.seed)
    for task, form in kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS):
        count = settings.heldout if task in tasks.TASKS else settings.heldout_chats
        prompts = tasks.distinct(task, form, "heldout", count, settings.seed)
        prompts = [example for example in prompts if not tasks.is_quoted(example)]
        greedy = evaluate(model, tokenizer, prompts, padding=40)
        sampled = None
        if task in ("add2", "sub2"):
            sampled = evaluate(model, tokenizer, prompts * SAMPLES, sample=True, padding=40)
        results.append(Result(task, form, len(prompts), greedy, sampled))
    return results
