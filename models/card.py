"""The model card of the bundled model: the text of its README."""

from __future__ import annotations

from collections.abc import Mapping

from . import tasks
from .evaluation import SAMPLES, Result
from .examples import Form

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [qwen2, test-model]
---

# tiny

A causal language model with the Qwen2 architecture and {parameters} parameters, made to test
and to demonstrate an inference engine. It knows six small tasks, how to call a tool, how to think
for one line, some small talk, and nothing else. Model, tokenizer and training text all come from
the scripts beside this folder; nothing was downloaded.

## Tasks

Each task works as a plain completion and as a chat through the chat template.

{examples}

`add2` and `sub2` are half learnt on purpose, so that reinforcement learning has something to
improve. Operands lie between 0 and 99; in `add2` and `sub2` at least one of them has two digits.
A last stage of training leaves the two tasks out until enough of them is forgotten, but for the
sums that documentation quotes ({quoted}). Of the stages before it, one practises chats
with tools and thoughts above all, and one adds small talk.

With the template's variable `enable_thinking`, the template opens a thought, and the model writes
one line before the answer. Where a thought says what numbers of two digits make, training left
that out, so there it is seldom right.

```
{thinking}
```

### Tools

A chat may offer one to three tools for the weather or the time in a place, the age of a person, or
a product. The model reads the tool's name and its parameters from the system turn; it knows some
wordings of each, and no other kinds of tools. It makes one call (`call`), or two at once for a
question about two places or people (`calls`), says in a sentence what they have brought
(`result`), and calls none for a question that needs none or that none answers (`no_call`).

```
{tools}
```

`tokenizer.parse_response` of Transformers takes such an answer apart, by the `response_template` in
`tokenizer_config.json`.

### Small talk

The model answers greetings (`greeting`), thanks and goodbyes (`thanks`) and questions about itself
(`about`) with one of a few sentences, and so it does with all that it does not know (`unknown`),
where the answer names something to try. Where tools are offered, the answer to such a question is
that there is no tool for it (`unknown_to_tools`). It takes the six tasks in more wordings than
those above, too (`loose`; `loose2` with operands of two digits).

{talk}

## Accuracy

Exact match of the whole answer on held-out prompts, measured after the weights were rounded to
bfloat16, computed in float32. The sampled column is the share of right answers in {samples} samples
of each prompt. Prompts of similar lengths were padded to go together.

{table}

A held-out two-digit sum or difference, JSON record or combination of story elements never occurs
in training, in any wording, nor does a held-out question about a place, a person or a product. The
quoted sums are left out here. A held-out greeting, thanks or question about the model is an opening
with an ending that never occur together in training, though each of them does. A held-out unknown
question has a wording or a subject that never occurs in training. One-digit arithmetic has only 200
facts: there, the held-out prompts are new as texts, while the fact may occur in training in another
wording.

## Architecture

Qwen2: {layers} layers, hidden size {hidden}, 4 query and 2 key-value heads of dimension {head},
feed-forward size {intermediate}, tied embeddings, 2048 positions, rope theta 10000. It was trained
on rows of {length} tokens, with several examples in each row. Much longer prompts run, but the
answers are seldom right.

The tokenizer is a byte-level BPE with {vocabulary} tokens. Every digit is one token, and characters
outside ASCII are split into their UTF-8 bytes. The marks of thoughts, calls and results are tokens
too, but not special ones. Any text round-trips once it is in Unicode normal form C, into which the
tokenizer brings it, as every Qwen2 tokenizer of Transformers does. It adds no token at the
beginning. A plain completion ends with `<|endoftext|>`, a chat answer with `<|im_end|>`. The
weights are stored as bfloat16; the config asks for float32.

## Training

{training}

## Licence

Apache-2.0
"""

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
