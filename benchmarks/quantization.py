"""Accuracy and perplexity of the bundled model by format of its weights and of its KV cache.

    python benchmarks/quantization.py [--prompts 50] [--formats "int8;int4 32;..."]
        [--json FILE] [--plot FILE]

The tasks and held-out prompts are those of `examples/bundled_models`: their exact answers, greedy,
and the logprobs of the right answers' tokens. Nothing is drawn at random, so a run repeats its
numbers at any load.

Columns: bytes are those of all parameters, tied ones once; `bits` a weight on average. `ppl` is the
perplexity of the right answers' tokens. `all` is the accuracy over all kinds of tasks, each counted
alike; `sums` that over additions and subtractions of two digits, which the model half knows, so
small errors show there first. `same` is the share of answers with the tokens that bfloat16 gives,
and `|dlogprob|` the mean difference of a right token's logprob from bfloat16's: what a trainer's
importance ratios see.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Table, options, record, refuse_unknown
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.tests.gguf_files import write_gguf

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


def write_fp8(folder: Path) -> Path:
    """Write the bundled model with FP8 weights, each output with a scale."""
    source = EngineConfig().model_folder
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = {**settings, "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and "embed" not in name:
            scales = tensor.float().abs().amax(1, keepdim=True) / 448
            tensors[f"{name}_scale"] = scales
            tensor = (tensor.float() / scales).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


FILES: dict[str, Callable[[Path], Path]] = {
    "FP8 by output": write_fp8,
    "GGUF Q8_0": partial(write_gguf, kind="Q8_0"),
    "GGUF Q4_0": partial(
        write_gguf, kind=lambda name: "Q8_0" if name.startswith("token_embd") else "Q4_0"
    ),
}
"""Formats that are read from a file: the function writes it. K-quants need rows of 256 numbers,
which this model hasn't."""

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
    """Draw accuracy, perplexity and the difference from bfloat16 over the bytes of the weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.6))
    labels = {
        "accuracy": "accuracy of greedy answers",
        "perplexity": "perplexity of right answers",
        "logprob_gap": "mean difference of logprobs from bfloat16",
    }
    colours = pyplot.get_cmap("tab10")
    for axis, (field, label) in zip(axes, labels.items(), strict=True):
        for number, (name, values) in enumerate(found.items()):
            if values[field] > 0:
                place = (values["bytes"] / 1e6, values[field])
                axis.plot(*place, "os^D"[number // 10], color=colours(number % 10), label=name)
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.set_xticks([0.7, 1, 1.5, 2, 3, 5], ["0.7", "1", "1.5", "2", "3", "5"])
        axis.set_xlabel("MB of weights")
        axis.set_ylabel(label)
    axes[2].set_yscale("log")
    # An error of the mean of so many questions is 0.01.
    middle = found[BASE]["accuracy"]
    axes[0].set_ylim(middle - 0.05, middle + 0.05)
    axes[1].ticklabel_format(axis="y", useOffset=False)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = options(__doc__, prompts=50, formats=";".join([*FORMATS, *FILES]), plot=Path)
    arguments = parser.parse_args()
    names = arguments.formats.split(";")
    refuse_unknown(parser, names, {**FORMATS, **FILES})
    shared = {"max_batch_size": 64, "device": "cpu", "cpu_threads": 1, "dtype": "bfloat16"}
    tokenizer = AutoTokenizer.from_pretrained(EngineConfig().model_folder, local_files_only=True)
    questions = held_out(tokenizer, arguments.prompts)
    tokens = sum(len(each.answer) for each in questions)
    print(f"{len(questions):,} held-out questions, {tokens:,} tokens of right answers")
    table = Table(COLUMNS, "weights", max(map(len, names)) + 1)
    found: dict[str, dict[str, float]] = {}
    base, parameters = None, 0
    with tempfile.TemporaryDirectory() as folder:
        for name in [BASE, *(each for each in names if each != BASE)]:
            settings = FORMATS.get(name, {})
            if name in FILES:
                settings = {"model_path": str(FILES[name](Path(folder) / name))}
            config = EngineConfig(**{**shared, **settings})
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
