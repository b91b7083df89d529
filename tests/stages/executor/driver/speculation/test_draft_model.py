"""The draft model's guesses, compared with the target's tokens; failures end drafting only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.choose import TokenChooser
from nano_inference.stages.executor.driver.speculation import draft_model
from nano_inference.stages.executor.driver.speculation.draft_model import (
    DraftModel,
    load_draft_model,
)
from nano_inference.stages.executor.driver.speculation.drafts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    DraftSource,
)
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.parts.speculation import Speculation
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.kv_cache import block_bytes, count_blocks
from nano_inference.stages.executor.runner.model import load_model, wrap_model

from .....soaking import in_soak
from ...models import VOCAB, make_model
from ...plans import step_plan
from .drafting import DraftingLane, VerifyAll, assert_same

pytestmark = pytest.mark.usefixtures("unmeasured")
LIMIT = 6


@dataclass
class Guess:
    """A draft, and behind how many tokens of its sequence it was made."""

    seq_id: int
    known: int
    draft: Draft


@dataclass
class Run:
    """The tokens of each sequence of a lane, prompt included, and all drafts."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    guesses: list[Guess] = field(default_factory=list)

    def right(self) -> tuple[int, int]:
        """How many drafted tokens came as they were drafted, and how many could have."""
        right = total = 0
        for guess in self.guesses:
            came = self.tokens[guess.seq_id][guess.known : guess.known + len(guess.draft.tokens)]
            total += len(came)
            for token, drafted in zip(came, guess.draft.tokens, strict=False):
                if token != drafted:
                    break
                right += 1
        return right, total

    def assert_right(self, least: int) -> None:
        """All drafted tokens were right, and these were more than so many."""
        right, total = self.right()
        assert right == total > least


class Recorder(DraftModel):
    """A draft model whose drafts are recorded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.guesses: list[Guess] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        for context, draft in zip(contexts, drafts, strict=True):
            assert len(draft.tokens) == len(draft.likelihoods) <= context.limit
            assert draft == NO_DRAFT or draft.source == "model"
            self.guesses.append(Guess(context.seq_id, len(context.tokens), draft))
        return drafts


class DraftedLane(DraftingLane):
    """Batching and executor, with a draft model for all drafts."""

    def __init__(
        self,
        target: Any = None,
        draft: Any = None,
        *,
        draft_len: int = 256,
        preempt_every: int = 0,
        vocab_size: int = VOCAB,
        **settings: Any,
    ) -> None:
        defaults = {"block_size": 8, "max_batch_size": 8, "kv_cache_bytes": 1 << 22}
        config = EngineConfig(speculation="auto", max_draft_tokens=LIMIT, **(defaults | settings))
        target, draft = target or make_model("llama"), draft or make_model("llama")
        core = ExecutorCore(config, model=wrap_model(target, 256))
        super().__init__(config, core, preempt_every=preempt_every)
        config = msgspec.structs.replace(config, draft_model_path="given")
        model = wrap_model(draft, draft_len)
        self.draft_model = Recorder(config, model, core._table, core.cache.num_blocks, vocab_size)
        self.speculate()

    def speculate(self, *sources: DraftSource) -> None:
        """Draft by these sources, and then by the draft model, and verify all."""
        core = self.core
        speculator = Speculator(
            core._table, core.constraints, sources, VerifyAll(), self.draft_model
        )
        core.part(Speculation).use(speculator)

    def answer(self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]) -> Run:
        """Complete prompts, and return the drafts."""
        first = len(self.found) + 1
        self.draft_model.guesses = []
        for seq_id, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True), first):
            self.add(seq_id, sampling, prompt)
        self.run()
        answers = {
            seq_id: [*prompt, *(row[0] for row in self.found[seq_id])]
            for seq_id, prompt in enumerate(prompts, first)
        }
        return Run(answers, self.draft_model.guesses)


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24)
LIMITED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=24)


@pytest.mark.parametrize("kernels", ["auto", in_soak("off")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, LIMITED], ids=["greedy", "1.0", "limits"])
def test_the_target_as_its_own_draft_model_is_always_right(
    sampling: SamplingParams, kernels: str
) -> None:
    lane = DraftedLane(kernels=kernels)
    (run := lane.answer(prompts_of(3, 19, 40), [sampling] * 3)).assert_right(30)
    # With the likeliest tokens of a random model it is often unsure, and stops.
    longest = max(len(guess.draft.tokens) for guess in run.guesses)
    assert longest == LIMIT or sampling is GREEDY


def test_shared_random_numbers_make_matches_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_model("llama")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.02 * parameter.std())

    def share_of_right_first_tokens() -> float:
        run = DraftedLane(draft=draft).answer(prompts_of(3, 19, 40), [SAMPLED] * 3)
        made = [guess for guess in run.guesses if guess.draft.tokens]
        firsts = [run.tokens[guess.seq_id][guess.known] for guess in made]
        right = sum(
            first == guess.draft.tokens[0] for first, guess in zip(firsts, made, strict=True)
        )
        return right / len(made)

    shared = share_of_right_first_tokens()

    class WithOthers(TokenChooser):
        def choose(self, *args: Any, **kwargs: Any) -> Any:
            self.table.seed += np.uint64(1)
            chosen = super().choose(*args, **kwargs)
            self.table.seed -= np.uint64(1)
            return chosen

    monkeypatch.setattr(draft_model, "TokenChooser", WithOthers)
    independent = share_of_right_first_tokens()
    assert 0.6 < shared < 1
    assert independent < 0.4


def test_a_useless_draft_model_soon_runs_no_passes() -> None:
    lane = DraftedLane(draft=make_model("qwen3", seed=5, num_hidden_layers=1))
    run = lane.answer(prompts_of(9, 20), [SamplingParams(temperature=1.0, max_tokens=100)] * 2)
    right, total = run.right()
    assert right < total / 4
    assert sum(guess.draft == NO_DRAFT for guess in run.guesses) > len(run.guesses) / 2


def test_a_likely_token_is_called_likely() -> None:
    lane = DraftedLane()
    run = lane.answer(prompts_of(12), [GREEDY])
    chances = [chance for guess in run.guesses for chance in guess.draft.likelihoods]
    assert all(0 < chance <= 1 for chance in chances)
    assert len(chances) > 8
    # A draft ends with the first token of which it is unsure.
    inner = [chance for guess in run.guesses for chance in guess.draft.likelihoods[:-1]]
    assert min(inner) >= 0.3


def test_bias_and_repetition_penalty_are_followed_as_far_as_they_are_known() -> None:
    biased = SamplingParams(temperature=1.0, max_tokens=24, logit_bias={7: 30.0})
    lane = DraftedLane()
    run = lane.answer(prompts_of(12), [biased])
    assert run.tokens[1][12:] == [7] * 24
    run.assert_right(12)


def test_a_stop_token_is_the_last_of_a_draft() -> None:
    free = DraftedLane().answer(prompts_of(12), [GREEDY])
    stop = free.tokens[1][12 + 9]
    ending = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=frozenset({stop}))
    run = DraftedLane().answer(prompts_of(12), [ending])
    drafted = [guess.draft.tokens for guess in run.guesses]
    assert any(tokens[-1:] == (stop,) for tokens in drafted)
    assert not any(stop in tokens[:-1] for tokens in drafted)


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
def test_shared_prefixes_copies_and_preemption(cache_type: str) -> None:
    lane = DraftedLane(preempt_every=2, cache_type=cache_type)
    first, second = prompts_of(37, 37)
    # Whole blocks shared, a part of one copied, and a prompt that comes again.
    prompts = [first, first[:20] + second[20:], first[:29] + second[29:], second, first]
    lane.answer(prompts, [SAMPLED] * 5).assert_right(60)
    again, more = lane.answer(prompts, [GREEDY] * 5).right()
    assert again == more > 40
    assert lane.preempted > 3
    assert lane.batching.take_counters().cached > 100


def test_blocks_that_are_filled_are_not_computed_again() -> None:
    lane = DraftedLane()
    (prompt,) = prompts_of(100)
    computed: list[int] = []
    forward = lane.draft_model._forward

    def counted(rows: Any, starts: Any, counts: Any, ids: Any) -> Any:
        computed.append(int(counts.sum()))
        return forward(rows, starts, counts, ids)

    lane.draft_model._forward = counted  # type: ignore[method-assign]
    lane.answer([prompt], [SamplingParams(max_tokens=4)])
    assert computed[0] == 101
    computed.clear()
    right, total = lane.answer([prompt], [SAMPLED]).right()
    assert computed[0] <= 9
    assert right == total > 12
    lane.draft_model.cache.clear()
    lane.draft_model.forget_kv()
    computed.clear()
    right, total = lane.answer([prompt], [SAMPLED]).right()
    assert computed[0] == 101
    assert right == total > 12


def test_a_draft_model_that_does_not_pay_rests() -> None:
    run, sampling = {}, SamplingParams(temperature=1, max_tokens=100, max_draft_tokens=1)
    for saved in (0.0, 1e9):
        lane = DraftedLane()
        speculator = lane.core.part(Speculation).speculator
        assert speculator is not None
        speculator.control.value = lambda *_, saved=saved: (0.0, saved)  # type: ignore[method-assign]
        run[saved] = len(lane.answer(prompts_of(4), [sampling]).guesses)
    # Two tokens a step, and 16 steps in a row without it.
    assert run[1e9] >= 48
    assert run[0.0] < 45


def test_a_long_prompt_is_read_over_several_steps() -> None:
    lane = DraftedLane(max_tokens_per_batch=16)
    run = lane.answer(prompts_of(90, 4), [GREEDY] * 2)
    run.assert_right(15)
    of_long = [guess.draft for guess in run.guesses if guess.seq_id == 1]
    assert of_long[:5] == [NO_DRAFT] * 5
    assert of_long[7] != NO_DRAFT


def test_no_drafts_beyond_the_draft_models_longest_context() -> None:
    lane = DraftedLane(draft_len=30)
    run = lane.answer(prompts_of(20), [SAMPLED])
    run.assert_right(5)
    ends = [guess.known + len(guess.draft.tokens) for guess in run.guesses if guess.draft.tokens]
    # The token at place 30 follows from 30 tokens.
    assert max(ends) == 31
    assert run.guesses[-1].draft == NO_DRAFT


def test_broken_draft_weights_end_only_drafting() -> None:
    draft = make_model("llama")
    lane = DraftedLane(draft=draft)
    lane.answer(prompts_of(20), [GREEDY])
    with torch.no_grad():
        draft.get_output_embeddings().weight[3] = float("nan")
        draft.get_input_embeddings().weight[:] = float("nan")
    run = lane.answer(prompts_of(20, 30), [GREEDY] * 2)
    assert all(guess.draft == NO_DRAFT for guess in run.guesses)
    assert len(run.tokens[2]) == 44
    caches = (*lane.draft_model.cache.keys, *lane.draft_model.cache.values)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in caches)


@pytest.mark.parametrize("size", [VOCAB - 20, VOCAB + 20])
def test_a_vocabulary_with_other_padding_is_accepted(size: int) -> None:
    lane = DraftedLane(draft=make_model("llama", seed=3, vocab_size=size))
    run = lane.answer(prompts_of(9, 20), [SAMPLED] * 2)
    drafted = [token for guess in run.guesses for token in guess.draft.tokens]
    assert drafted
    assert max(drafted) < min(size, VOCAB)


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models without tokenizers: "target", "same" of its vocabulary, "other" of another."""
    folder = tmp_path_factory.mktemp("models")
    make_model("llama").save_pretrained(folder / "target")
    make_model("qwen3", num_hidden_layers=1).save_pretrained(folder / "same")
    make_model("llama", vocab_size=VOCAB + 1).save_pretrained(folder / "other")
    return folder


def config_of(folders: Path, draft: str, **settings: Any) -> EngineConfig:
    path = str(folders / draft)
    return EngineConfig(model_path=str(folders / "target"), draft_model_path=path, **settings)


def test_a_model_of_the_same_vocabulary_is_taken(folders: Path) -> None:
    config = config_of(folders, "same", dtype="float32", max_model_len=100)
    draft = load_draft_model(config, load_model(config))
    assert (len(draft.layers), draft.vocab_size, draft.max_model_len) == (1, VOCAB, 100)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("other", "it has 212 tokens and the model has 211"),
        ("nowhere", "the draft model: there is no model folder"),
    ],
)
def test_unusable_draft_models_are_refused(folders: Path, draft: str, message: str) -> None:
    config = config_of(folders, draft)
    with pytest.raises(ModelError, match=message):
        load_draft_model(config, load_model(config))


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    """Of the bundled model, with tokens under the ids of others."""
    config = EngineConfig(draft_model_path="tiny")
    target = load_model(config)
    assert load_draft_model(config, target).vocab_size == target.vocab_size
    for path in config.model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(vocabulary.values(), reverse=True)
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, ids, strict=True))
    path.write_text(json.dumps(tokenizer))
    other = EngineConfig(draft_model_path=str(tmp_path))
    with pytest.raises(ModelError, match=r"another vocabulary: [0-9]+ of the"):
        load_draft_model(other, target)


def test_both_caches_share_the_memory_with_the_same_number_of_blocks() -> None:
    target, draft = (wrap_model(make_model(name), 128) for name in ("llama", "gemma2"))
    config = EngineConfig(block_size=8, max_batch_size=64, kv_cache_bytes=1 << 22)
    per_block = block_bytes(target, 8) + block_bytes(draft, 8)
    assert (
        count_blocks(config, target, draft) == (1 << 22) // per_block < count_blocks(config, target)
    )
    scarce = EngineConfig(block_size=8, max_batch_size=1, kv_cache_bytes=15 * per_block)
    assert count_blocks(scarce, target) >= 16
    with pytest.raises(ModelError, match=f"needs {16 * per_block} bytes of KV cache"):
        count_blocks(scarce, target, draft)


# --- in a lane --------------------------------------------------------------------------------


def lane_of(folders: Path, **settings: Any) -> DraftingLane:
    """Of the target, with itself as the draft model."""
    config = config_of(
        folders, "target", max_model_len=128, max_draft_tokens=LIMIT, kv_cache_bytes=1 << 21
    )
    config = msgspec.structs.replace(config, draft_sources=(), **settings)
    return DraftingLane(config, ExecutorCore(config))


def test_the_draft_model_is_loaded_and_its_kv_released_with_the_rest(folders: Path) -> None:
    lane, plain = lane_of(folders, speculation="auto"), lane_of(folders)
    assert plain.core.find(Speculation) is None
    model = lane.core.part(Speculation).draft_model
    assert model is not None
    assert model.cache.num_blocks == lane.core.cache.num_blocks < plain.core.cache.num_blocks
    assert lane.core.part(Speculation).speculator is not None
    lane.core.part(Speculation).speculator.control = VerifyAll()
    (prompt,) = prompts_of(30)
    for each in (lane, plain):
        each.add(1, SAMPLED, prompt)
    assert_same(lane.run(), plain.run())
    assert lane.accepted == lane.drafted > 10
    lane.core.part(MemoryRelease).memory.begin_release(["kv_cache"])
    lane.batching.cache.flush()
    lane.core.execute(step_plan(1000, release=("kv_cache",)))
    assert {tensor.untyped_storage().nbytes() for tensor in model.cache.keys} == {4}
    lane.core.part(MemoryRelease).resume(["kv_cache"])
    for each in (lane, plain):
        each.add(2, SAMPLED, prompt)
    drafted = lane.drafted
    assert_same(lane.run(), plain.run())
    assert lane.accepted == lane.drafted > drafted
    lane.core.close()


def test_new_weights_of_the_target_leave_it_as_it_is(folders: Path) -> None:
    lane = lane_of(folders, speculation="auto")
    model = lane.core.part(Speculation).draft_model
    assert model is not None
    before = [parameter.clone() for parameter in model._runner.model.module.parameters()]
    with torch.no_grad():
        for parameter in lane.core.part(WeightChanges).manager.parameters():
            parameter.mul_(0.5)
    after = model._runner.model.module.parameters()
    assert all(map(torch.equal, before, after))


def test_cheap_sources_are_asked_before_the_draft_model() -> None:
    class OfTheFirst(DraftSource):
        def _propose(self, context: DraftContext) -> Draft:
            return Draft((1, 2, 3)[: context.limit]) if context.seq_id == 1 else NO_DRAFT

    lane = DraftedLane()
    lane.speculate(OfTheFirst())
    run = lane.answer(prompts_of(5, 6), [SamplingParams(temperature=1.0, max_tokens=60)] * 2)
    asked = Counter(guess.seq_id for guess in run.guesses)
    # The first one takes a step for nearly every token, and has others' drafts where there is room.
    assert asked[1] < 30
    assert asked[2] > 4


@pytest.mark.parametrize(
    ("error", "reason", "passes"),
    [
        (torch.OutOfMemoryError("no memory left"), "OutOfMemoryError('no memory left')", 0),
        (ModelError("no numbers"), "no numbers", 1),
        (IndexError(5), "IndexError(5)", 5),
    ],
)
def test_a_pass_that_fails_costs_its_drafts_alone(
    error: Exception, reason: str, passes: int
) -> None:
    """At first, in the middle of a draft, and behind some that were verified."""
    prompts, samplings = prompts_of(20, 30, 9), [GREEDY, SAMPLED, SAMPLED]
    plain = DraftedLane()
    plain.draft_model._broken = True
    wanted = plain.answer(prompts, samplings).tokens
    lane = DraftedLane()
    forward, left = lane.draft_model._forward, passes

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal left
        if not left:
            raise error
        left -= 1
        return forward(*arguments)

    lane.draft_model._forward = failing  # type: ignore[method-assign]
    assert lane.answer(prompts, samplings).tokens == wanted
    assert [lane.draft_model.take_failure() for _ in range(2)] == [reason, ""]
    lane.draft_model._forward = forward  # type: ignore[method-assign]
    lane.draft_model.clear()
    lane.answer(prompts, samplings).assert_right(20)
