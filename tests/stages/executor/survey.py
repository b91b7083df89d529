"""Trial of all decoder-only kinds of Transformers, each on a tiny random model in float32.

`python -m tests.stages.executor.survey` writes the table "kinds" of docs/models.md; with names, it
only shows what becomes of these. Every model is loaded from its folder, with the default kernels,
and compared with `generate`: cold, from a warm cache, and prompts that go on with their answers;
each with whole prompts and in chunks of 7 beside decoding sequences.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore

from .lane import Answer, Lane
from .references import generate, least_lead, scored
from .report import DOCUMENT, MAX_DIFFERENCE, put_table, read_table
from .survey_models import MAX_LEN, VOCAB, names, small_config, small_model

_NEW_TOKENS = 12
_LENGTHS = (34, 19, 7, 2)
_CHUNK = 7
_SEEDS = 8
_ROUNDING = 1e-3
"""More than that is no rounding in float32."""

NEEDS = {
    "is an encoder-decoder model": "an encoder, and a cache of what it gives",
    "does not use Transformers' attention interface": "its attention on that interface, in "
    "Transformers",
    "an indexer": "that indexer's keys in the cache",
    "it returns logits of all tokens": "that option in Transformers' class",
    "computes attention by": "that option in our attention",
    "recurrent layers of a kind": "an operator that takes the state before each sequence's tokens",
    "is not a causal language model": "an output layer that generates",
    "don't have a KV cache of their own": "a cache for each call of a layer",
    "its masks are of the call": "a mask whose rule is that of its attention",
    "compute with their masks": "a mask whose rule is that of its attention",
    "other logits": "state of its layers beside keys and values",
    "nor mix tokens by an operator": "an operator that takes the state before each sequence's "
    "tokens",
}
"""What a refused kind would need, by a part of its refusal."""


class Outcome(NamedTuple):
    """The end of a trial.

    Attributes:
        result: `equal`, `tokens equal`, `different`, `refused`, or `not made` (no tiny model).
        reason: Why; of equal ones, the largest difference of a logprob.
    """

    result: str
    reason: str = ""

    def needs(self) -> str:
        """The piece that is missing to serve it."""
        return next((needs for part, needs in NEEDS.items() if part in self.reason), "")


def trial(name: str) -> Outcome:
    """Serve a tiny model of this kind or variant, and compare it with `generate`."""
    try:
        config = small_config(name)
        if config.is_encoder_decoder:
            return Outcome("refused", "is an encoder-decoder model")
        model = small_model(config)
        reference = _Reference(model)
    except Exception as error:  # noqa: BLE001 - Transformers' code raises anything
        return Outcome("not made", f"{type(error).__name__}: {_sentence(error)}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "its folder")
        model.save_pretrained(folder)
        del model
        try:
            return _compare(folder, reference)
        except ModelError as error:
            reason = re.sub(r"^\w+ (can't be served: )?", "", _sentence(error))
            return Outcome("refused", re.sub(r"layers? [\d, ]+ ", " ", reason).strip())


class _Expected(NamedTuple):
    """Greedy tokens, their logprobs, and the least lead of one over the next best."""

    tokens: list[int]
    logprobs: list[float]
    lead: float


class _Reference:
    """Prompts without a near tie, and what Transformers makes of them."""

    def __init__(self, model: Any) -> None:
        for seed in range(_SEEDS):
            rng = random.Random(seed)
            self.prompts = [[rng.randrange(3, VOCAB - 12) for _ in range(n)] for n in _LENGTHS]
            self.expected = [_expected(model, prompt) for prompt in self.prompts]
            self.continued = [
                prompt + expected.tokens + [5, 6, 7]
                for prompt, expected in zip(self.prompts, self.expected, strict=True)
            ]
            self.expected_later = [_expected(model, prompt) for prompt in self.continued]
            if min(each.lead for each in self.expected + self.expected_later) > 4 * MAX_DIFFERENCE:
                return
        raise ValueError(f"near ties with each of {_SEEDS} seeds")


def _expected(model: Any, prompt: list[int]) -> _Expected:
    chosen, logits = generate(model, [prompt], _NEW_TOKENS)
    tokens = chosen[0].tolist()
    whole = scored(model, prompt, tokens)
    # Steps of some kinds compute other numbers than the pass without a cache, which a trainer uses.
    if not torch.allclose(logits.log_softmax(-1)[0], whole, rtol=0, atol=MAX_DIFFERENCE):
        tokens = []
        for _ in range(_NEW_TOKENS):
            tokens.append(int(scored(model, prompt, [*tokens, 0])[-1].argmax()))
        whole = scored(model, prompt, tokens)
    if not whole.isfinite().all():
        raise ValueError("logits are not finite")
    logprobs = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return _Expected(tokens, logprobs.tolist(), least_lead(whole[None]))


def _compare(folder: Path, reference: _Reference) -> Outcome:
    worst = 0.0
    for chunk in (None, _CHUNK):
        settings: dict[str, Any] = {"max_batch_size": 8}
        if chunk is not None:
            settings = {"max_batch_size": 4, "max_tokens_per_batch": chunk}
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_bytes=1 << 24,
            max_model_len=MAX_LEN,
            **settings,
        )
        core = ExecutorCore(config)
        lane = Lane(config, core)
        try:
            for case, prompts, expected in (
                ("cold", reference.prompts, reference.expected),
                ("warm", reference.prompts, reference.expected),
                ("continued", reference.continued, reference.expected_later),
            ):
                found = _difference(lane.run(prompts, _NEW_TOKENS), expected)
                if not found < _ROUNDING:
                    how = f"chunks of {chunk}" if chunk else "whole prompts"
                    return Outcome("different", f"{case}, {how}: {found:.2g}")
                worst = max(worst, found)
        finally:
            core.close()
    if worst >= MAX_DIFFERENCE:
        return Outcome("tokens equal", f"logprobs differ by rounding, by less than {_ROUNDING:g}")
    return Outcome("equal", f"{worst:.1e}")


def _difference(answers: list[Answer], expected: list[_Expected]) -> float:
    """Return the largest difference of a logprob; infinity if tokens differ."""
    worst = 0.0
    for answer, wanted in zip(answers, expected, strict=True):
        if answer.token_ids != wanted.tokens:
            return float("inf")
        pairs = zip(answer.logprobs, wanted.logprobs, strict=True)
        worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
    return worst


def _sentence(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    text = re.sub(r" \(by .*?\)|/\S+/", "", text)
    return re.split(r"; (?=choose|set)|\. ", text)[0][:160]


# --- the document -----------------------------------------------------------------------------

HEADINGS = ["result", "`model_type`", "number", "needs"]


def rows_of(outcomes: dict[str, Outcome]) -> list[list[str]]:
    """The rows of the table: kinds with one result, and one reason, share a row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, outcome in outcomes.items():
        reason = "" if outcome.result == "equal" else f": {outcome.reason}"
        groups.setdefault((outcome.result, reason, outcome.needs()), []).append(_shown(name))
    order = {"equal": 0, "tokens equal": 1, "different": 2, "refused": 3, "not made": 4}
    return [
        [f"{result}{reason}".replace("|", "/"), ", ".join(kinds), str(len(kinds)), needs]
        for (result, reason, needs), kinds in sorted(
            groups.items(), key=lambda item: (order[item[0][0]], -len(item[1]), item[1])
        )
    ]


def written_results() -> dict[str, str]:
    """The results in the document, by name."""
    headings, rows = read_table("kinds")
    assert headings == HEADINGS
    return {
        name.replace("`", ""): row[0].partition(":")[0]
        for row in rows
        for name in re.split(r", (?=`)", row[1])
    }


def _shown(name: str) -> str:
    kind, comma, variant = name.partition(",")
    return f"`{kind}`{comma}{variant}"


def main() -> None:
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    torch.set_num_threads(1)
    outcomes = {}
    for name in sys.argv[1:] or names():
        began = time.perf_counter()
        outcomes[name] = trial(name)
        took = time.perf_counter() - began
        sys.stdout.write(
            f"{name}\t{outcomes[name].result}\t{outcomes[name].reason}\t{took:.1f} s\n"
        )
        sys.stdout.flush()
    if not sys.argv[1:]:
        DOCUMENT.write_text(put_table(DOCUMENT.read_text(), "kinds", HEADINGS, rows_of(outcomes)))


if __name__ == "__main__":
    main()
