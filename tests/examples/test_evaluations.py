"""lm-evaluation-harness and Inspect ask `serve`, and report what the model itself says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

from .environments import FOLDER, run_example

TOLERANCE = 1e-4
MODEL = EngineConfig().model_folder

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TEXTS = lines(FOLDER / "tasks" / "continuations.jsonl")
QUESTIONS = lines(FOLDER / "tasks" / "questions.jsonl")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@torch.inference_mode()
def scored(token_ids: list[int], begin: int) -> tuple[float, bool]:
    """By Transformers: how likely the tokens from a place on are, and whether all are greedy."""
    logits = model()(torch.tensor([token_ids])).logits[0, begin - 1 : -1]
    found = torch.tensor(token_ids[begin:])
    logprobs = logits.log_softmax(-1).gather(-1, found[:, None])
    return float(logprobs.sum()), bool((logits.argmax(-1) == found).all())


@cache
def generated(stop: tuple[str, ...], max_tokens: int) -> tuple[list[str], list[str]]:
    """By the engine alone: what continues the texts, and the answers to the questions."""
    sampling = SamplingParams(temperature=0.0, stop=stop, max_tokens=max_tokens)
    chats = [
        tokenizer().apply_chat_template(
            [{"role": "user", "content": each["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for each in QUESTIONS
    ]
    texts = [each["text"] for each in TEXTS]
    with InferenceEngine(EngineConfig()) as engine:
        samples = engine.generate([*texts, *chats], sampling)
    found = [
        tokenizer().decode(sample.completion_tokens, skip_special_tokens=True) for sample in samples
    ]
    for each in stop:  # its tokens are the engine's, its text is not the answer's
        found = [text.partition(each)[0] for text in found]
    return found[: len(texts)], found[len(texts) :]


@pytest.fixture(scope="module")
def harness(
    serving: str, programs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of lm-evaluation-harness's results."""
    folder = tmp_path_factory.mktemp("harness")
    run_example("lm_eval.sh", serving, programs("lm_eval.sh"), folder)
    return folder


def samples(harness: Path, task: str) -> list[dict[str, Any]]:
    """Return the harness's record of each document, in their order."""
    (path,) = harness.glob(f"*/tiny/samples_{task}_*.jsonl")
    return sorted(lines(path), key=lambda sample: int(sample["doc_id"]))


def reported(harness: Path, task: str, metric: str) -> float:
    """Return a metric of the harness's summary."""
    for path in harness.glob("*/tiny/results_*.json"):
        results = json.loads(path.read_text())["results"]
        if task in results:
            return float(results[task][f"{metric},none"])
    raise AssertionError(f"{task} was not run")


def test_the_harness_gets_loglikelihoods_and_greedy_flags(harness: Path) -> None:
    found = samples(harness, "tiny_choices")
    greedy, right = 0, 0
    for sample, doc in zip(found, TEXTS, strict=True):
        likelihoods = []
        begin = len(tokenizer()(doc["text"]).input_ids)
        for (told,), choice in zip(sample["resps"], doc["choices"], strict=True):
            logprob, is_greedy = scored(tokenizer()(doc["text"] + choice).input_ids, begin)
            assert float(told[0]) == pytest.approx(logprob, abs=TOLERANCE)
            assert told[1] == str(is_greedy)
            likelihoods.append(logprob)
            greedy += is_greedy
        right += likelihoods.index(max(likelihoods)) == doc["right"]
    assert reported(harness, "tiny_choices", "acc") == pytest.approx(right / len(TEXTS))
    # Of both kinds there are some.
    assert 0 < greedy < sum(len(doc["choices"]) for doc in TEXTS)


def test_the_harness_finds_how_likely_whole_texts_are(harness: Path) -> None:
    end = tokenizer().eos_token_id
    for sample, doc in zip(samples(harness, "tiny_texts"), TEXTS, strict=True):
        text = doc["text"] + doc["choices"][doc["right"]]
        logprob, _ = scored([end, *tokenizer()(text).input_ids], 1)
        ((told,),) = sample["resps"]
        assert float(told) == pytest.approx(logprob, abs=TOLERANCE)


@pytest.mark.parametrize("task", ["tiny_answers", "tiny_chats"])
def test_the_harness_gets_the_texts_of_the_engine(harness: Path, task: str) -> None:
    texts, answers = generated(("\n", ".") if task == "tiny_answers" else ("\n",), 48)
    wanted = texts if task == "tiny_answers" else answers
    found = samples(harness, task)
    assert [sample["resps"] for sample in found] == [[[text]] for text in wanted]
    right = [text == sample["target"] for text, sample in zip(wanted, found, strict=True)]
    assert reported(harness, task, "exact_match") == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right)


@pytest.fixture(scope="module")
def inspected(
    serving: str, programs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of Inspect's logs."""
    folder = tmp_path_factory.mktemp("inspect")
    run_example("inspect_ai.sh", serving, programs("inspect_ai.sh"), folder)
    return folder


@pytest.mark.parametrize(
    ("called", "prefix"), [("chats", "chatcmpl-"), ("responses", "resp_"), ("vllm", "chatcmpl-")]
)
def test_inspect_scores_the_engines_answers(inspected: Path, called: str, prefix: str) -> None:
    _, answers = generated((), 100)
    (path,) = (inspected / called).glob("*.json")
    log = json.loads(path.read_text())
    assert log["status"] == "success"
    found = sorted(log["samples"], key=lambda sample: int(sample["id"]))
    assert [sample["output"]["completion"] for sample in found] == answers
    right = [text == doc["answer"] for text, doc in zip(answers, QUESTIONS, strict=True)]
    scores = [sample["scores"]["exact"]["value"] for sample in found]
    assert scores == ["C" if each else "I" for each in right]
    (score,) = log["results"]["scores"]
    assert score["metrics"]["mean"]["value"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right)
    for sample, text in zip(found, answers, strict=True):
        assert sample["output"]["response_id"].startswith(prefix)
        assert sample["output"]["choices"][0]["stop_reason"] == "stop"
        # The token that ends an answer has no text.
        assert sample["output"]["usage"]["output_tokens"] == len(tokenizer()(text).input_ids) + 1
