"""The model card of the bundled model: the text of its README."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import tasks
from .evaluation import SAMPLES, Result
from .examples import Form

CARD = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")

TRAINED = """\
    python -m nano_inference.models.train{options} --out models/tiny

{steps} steps of {rows} rows took {minutes} minutes with {threads} CPU thread(s),
PyTorch {torch} and Transformers {transformers}. The same settings on the same machine should give
the same weights, also from one checkpoint to the next:

    {settings}"""

WENT_ON = """\
These weights are not from one run. The stages for small talk and for forgetting went on from the
weights of an earlier run, made before the script had small talk:

{run}

The earlier run was told in its card so:

{earlier}"""


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| task | form | held-out prompts | greedy right | greedy | sampled, temperature 1 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in results:
        sampled = "" if r.sampled is None else f"{r.sampled / (r.count * SAMPLES):.1%}"
        lines.append(
            f"| {r.task} | {r.form} | {r.count} | {r.greedy} | {r.greedy / r.count:.1%} "
            f"| {sampled} |"
        )
    return "\n".join(lines)


def training_section(text: str) -> str:
    """Return the section about training of a model card."""
    return text.partition("\n## Training\n")[2].partition("\n## Licence\n")[0].strip("\n")


def trained(earlier: str, run: Mapping[str, str]) -> str:
    """Return the card's section about training.

    Args:
        earlier: The same section of the weights that training went on from; "" for none.
        run: Steps, time, versions and settings of the run.
    """
    text = TRAINED.format(options=" --from models/tiny" if earlier else "", **run)
    if not earlier:
        return text
    quoted = "\n".join(f"> {line}".rstrip() for line in earlier.splitlines())
    return WENT_ON.format(run=text, earlier=quoted)


def card(facts: Mapping[str, str], results: list[Result], seed: int) -> str:
    """Return the text of the model card.

    Args:
        facts: The result of `train.facts`.
        results: The held-out evaluation.
        seed: Chooses the example of each kind.
    """
    examples = ["| task | form | prompt | answer |", "|---|---|---|---|"]
    forms: tuple[Form, ...] = ("plain", "chat")
    for task in tasks.TASKS:
        for form in forms:
            e = tasks.distinct(task, form, "heldout", 1, seed)[0]
            examples.append(f"| {task} | {form} | `{e.prompt}` | `{e.answer}` |")
    talk = ["| task | message | answer |", "|---|---|---|"]
    for task in tasks.TALK_TASKS:
        e = tasks.distinct(task, "chat", "heldout", 1, seed)[0]
        talk.append(f"| {task} | `{e.prompt}` | `{e.answer}` |")
    return CARD.format(
        examples="\n".join(examples),
        talk="\n".join(talk),
        samples=SAMPLES,
        quoted=" and ".join(f"`{expression}`" for expression in tasks.QUOTED),
        table=table(results),
        **facts,
    )
