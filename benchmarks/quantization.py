"""Accuracy and perplexity of the bundled model by format of its weights and of its KV cache.

    python benchmarks/quantization.py [--prompts 50] [--formats "int8,int4 32,..."]
        [--files "Q8_0=tiny-Q8_0.gguf,..."] [--json FILE] [--plot FILE]

The tasks and held-out prompts are those of `examples/bundled_models`: their exact answers, greedy,
and the logprobs of the right answers' tokens. Nothing is drawn at random, so a run repeats its
numbers, whatever the load.

Columns: bytes are those of all parameters, tied ones once; `bits` a weight on average. `ppl` is the
perplexity of the right answers' tokens. `all` is the accuracy over all kinds of tasks, each counted
alike; `sums` that over additions and subtractions of two digits, which the model half knows, so
small errors show there first. `same` is the share of answers with the tokens that bfloat16 gives,
and `|dlogprob|` the mean difference of a right token's logprob from bfloat16's: what a trainer's
importance ratios see.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Table, options, record, refuse_unknown
from transformers import AutoTokenizer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from bundled_models import tasks
from bundled_models.evaluation import kinds_of
from bundled_models.examples import Example
from bundled_models.tokenizer import END_OF_TEXT, TURN_END, encode, prompt_text

BASE = "bfloat16"

INT8: dict[str, Any] = {"quantization": "int8"}
INT4: dict[str, Any] = {"quantization": "int4"}

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    BASE: {},
    "int8": INT8,
    "int8 128": {**INT8, "quantization_group": 128},
    "int8 32": {**INT8, "quantization_group": 32},
    "int8, activations of 8 bits": {**INT8, "activation_bits": 8},
    **{f"int4 {group}": {**INT4, "quantization_group": group} for group in (128, 64, 32)},
    **{
        f"int4 {group} with zero points": {
            **INT4,
            "quantization_group": group,
            "quantization_zero_points": True,
        }
        for group in (128, 64, 32)
    },
    "int4 32, activations of 8 bits": {**INT4, "quantization_group": 32, "activation_bits": 8},
    "KV int8": {"kv_dtype": "int8"},
    "KV fp8": {"kv_dtype": "fp8"},
    "int8, KV int8": {**INT8, "kv_dtype": "int8"},
}
"""Settings by format; numbers are the inputs that share a scale, without one all of an output."""

SUMS = ("add2", "sub2")


@dataclass(frozen=True)
class Question:
    """A held-out example as tokens; the answer ends with the end of the turn or text."""

    example: Example
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Answers:
    """What the model says to all questions in one format.

    Attributes:
        tokens: Greedy tokens of each.
        logprobs: Of the right answers' tokens.
        right: Whether the greedy answer is exactly right.
        weight_bytes: Of all parameters.
        parameters: Their number in the whole model without codes.
    """

    tokens: list[tuple[int, ...]]
    logprobs: list[tuple[float, ...]]
    right: list[bool]
    weight_bytes: int


def held_out(tokenizer: Any, count: int) -> list[Question]:
    """Return up to `count` held-out questions of each kind of task."""
    found = []
    for task, form in kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS):
        for example in tasks.distinct(task, form, "heldout", count, seed=1):
            if not tasks.is_quoted(example):
                end = tokenizer.convert_tokens_to_ids(TURN_END if example.chat else END_OF_TEXT)
                prompt = encode(tokenizer, prompt_text(tokenizer, example))
                found.append(Question(example, prompt, [*encode(tokenizer, example.answer), end]))
    return found


def answer_all(config: EngineConfig, tokenizer: Any, questions: list[Question]) -> Answers:
    """Answer all questions, and score their right answers."""
    prompts = [each.prompt for each in questions]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(each.answer) + 2) for each in questions
    ]
    with InferenceEngine(config) as engine:
        samples = engine.generate(prompts, params)
        logprobs = engine.score(prompts, [each.answer for each in questions])
        weight_bytes = engine._executor.model.weight_bytes
    texts = (tokenizer.decode(s.completion_tokens, skip_special_tokens=True) for s in samples)
    return Answers(
        tokens=[sample.completion_tokens for sample in samples],
        logprobs=logprobs,
        right=[tasks.grade(q.example, text) for q, text in zip(questions, texts, strict=True)],
        weight_bytes=weight_bytes,
    )


def figures_of(
    answers: Answers, base: Answers, questions: list[Question], parameters: int
) -> dict[str, float]:
    """Return the columns of a format."""
    logprobs = [value for each in answers.logprobs for value in each]
    wanted = [value for each in base.logprobs for value in each]
    by_kind: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for question, right in zip(questions, answers.right, strict=True):
        by_kind[question.example.task, question.example.form].append(right)
    shares = {kind: statistics.fmean(right) for kind, right in by_kind.items()}
    same = [own == other for own, other in zip(answers.tokens, base.tokens, strict=True)]
    gaps = [abs(own - other) for own, other in zip(logprobs, wanted, strict=True)]
    return {
        "bytes": answers.weight_bytes,
        "bits": 8 * answers.weight_bytes / parameters,
        "perplexity": math.exp(-statistics.fmean(logprobs)),
        "accuracy": statistics.fmean(shares.values()),
        "sums": statistics.fmean(share for (task, _), share in shares.items() if task in SUMS),
        "same": statistics.fmean(same),
        "logprob_gap": statistics.fmean(gaps),
    }


COLUMNS = {
    "bytes": "{bytes:,}",
    "bits": "{bits:.2f}",
    "ppl": "{perplexity:.4f}",
    "all": "{accuracy:.2%}",
    "sums": "{sums:.2%}",
    "same": "{same:.2%}",
    "|dlogprob|": "{logprob_gap:.4f}",
}


def plot(found: dict[str, dict[str, float]], file: Path) -> None:
    """Draw accuracy and perplexity over the bytes of the weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    kinds = {"KV": "#228833", "activations": "#ccbb44", "zero": "#ee6677", "": "#4477aa"}
    for axis, field, label in zip(
        axes,
        ("accuracy", "perplexity"),
        ("accuracy of greedy answers", "perplexity of right answers"),
        strict=True,
    ):
        for name, values in found.items():
            colour = next(colour for word, colour in kinds.items() if word in name)
            place = (values["bytes"] / 1e6, values[field])
            axis.plot(*place, "o", color=colour, markersize=5)
            axis.annotate(
                name, place, fontsize=6, textcoords="offset points", xytext=(4, 3), rotation=20
            )
        axis.set_xscale("log")
        axis.set_xlabel("MB of weights")
        axis.set_ylabel(label)
        axis.minorticks_off()
        ticks = [0.5, 1, 2, 5]
        axis.set_xticks(ticks, [f"{each:g}" for each in ticks])
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = options(__doc__, prompts=50, formats=list(FORMATS), plot=Path, files=[""])
    arguments = parser.parse_args()
    formats = dict(FORMATS)
    for pair in filter(None, arguments.files):
        name, _, path = pair.partition("=")
        formats[name] = {"model_path": path}
        arguments.formats.append(name)
    refuse_unknown(parser, arguments.formats, formats)
    shared = {"max_batch_size": 64, "device": "cpu", "cpu_threads": 1}
    tokenizer = AutoTokenizer.from_pretrained(EngineConfig().model_folder, local_files_only=True)
    questions = held_out(tokenizer, arguments.prompts)
    tokens = sum(len(each.answer) for each in questions)
    print(f"{len(questions):,} held-out questions, {tokens:,} tokens of right answers")
    table = Table(COLUMNS, "weights", max(map(len, arguments.formats)) + 1)
    found: dict[str, dict[str, float]] = {}
    base, parameters = None, 0
    for name in [BASE, *(each for each in arguments.formats if each != BASE)]:
        config = EngineConfig(**{"dtype": "bfloat16", **shared, **formats[name]})
        answers = answer_all(config, tokenizer, questions)
        if base is None:
            base, parameters = answers, answers.weight_bytes // 2
        found[name] = figures_of(answers, base, questions, parameters)
        table.row(name, found[name])
    if arguments.plot is not None:
        plot(found, arguments.plot)
    record(arguments, questions=len(questions), answer_tokens=tokens, formats_measured=found)


if __name__ == "__main__":
    main()
