"""Images: which are encoded, when, and whose KV is found again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nano_inference.bus.control import ImageCapacity
from nano_inference.bus.media import MediaItem
from nano_inference.bus.parts.images import ImagesResult, PromptMedia
from nano_inference.bus.public import KVSession
from nano_inference.bus.sections import with_sections
from nano_inference.bus.steps import NewSequence, StepPlan, StepResult
from nano_inference.stages.batching.parts.images.keys import KeyIds, place
from nano_inference.stages.batching.schedule import MAX_SCORED_TOKENS

from ...sections import read
from .replica import CACHE_TYPES, CacheType, FakeReplica, RuleExecutor, expected

PLACEHOLDER = 49
IMAGES = {"a": 3, "b": 5, "c": 8}
"""Sizes in tokens of images, by id."""

CAPACITY = ImageCapacity(max_tokens=8, cache_tokens=12)
SEES_ITSELF = ImageCapacity(max_tokens=8, cache_tokens=12, sees_itself=True)

Part = int | str
"""A token, or an image."""


def prompt_of(parts: Sequence[Part]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """A prompt's tokens and images."""
    token_ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, str):
            media.append(MediaItem(part, len(token_ids), IMAGES[part], 1, 1, name=part))
            token_ids += [PLACEHOLDER] * IMAGES[part]
        else:
            token_ids.append(part)
    return token_ids, tuple(media)


def content_of(token_ids: Sequence[int], media: Sequence[MediaItem]) -> list[int]:
    """The tokens, with what an image shows in place of its placeholders."""
    content = list(token_ids)
    for item in media:
        for offset, index in enumerate(item.places(token_ids)):
            content[index] = 1000 * ord(item.id[0]) + offset
    return content


class ImageExecutor(RuleExecutor):
    """Computes with what images show, and checks that it has encoded them."""

    def __init__(self, num_blocks: int, block_size: int, capacity: ImageCapacity) -> None:
        super().__init__(num_blocks, block_size)
        self.capacity = capacity
        self.embeddings: dict[tuple[str, int], int] = {}
        self.encoded: list[str] = []

    def execute(self, plan: StepPlan) -> StepResult:
        if read(plan).weight_version or read(plan).release:
            self.embeddings.clear()
        for key in read(plan).forgotten_images:
            del self.embeddings[key]
        for item in read(plan).encodes:
            assert item.key not in self.embeddings, "it is encoded twice"
            self.embeddings[item.key] = item.num_tokens
            self.encoded.append(item.id)
        budget = sum(item.num_tokens for item in read(plan).encodes)
        assert budget <= self.capacity.max_tokens or len(read(plan).encodes) == 1
        assert sum(self.embeddings.values()) <= self.capacity.cache_tokens
        new = {each.seq_id: each for each in plan.new}
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if seq_id not in self.done:
                known = new.get(seq_id)
                start = self.computed[seq_id] if known is None else known.num_cached
                self._check(known or self.sequences[seq_id], start, start + count)
        shown = (replace(each, token_ids=_shown(each)) for each in plan.new)
        return super().execute(replace(plan, new=tuple(shown)))

    def forget(self) -> None:
        super().forget()
        self.embeddings.clear()

    def _check(self, seq: NewSequence, start: int, stop: int) -> None:
        for item in media_of(seq):
            first, last = item.start, item.start + item.num_tokens - 1
            if start <= last and first < stop:
                assert item.key in self.embeddings, "a row lacks an image"
            if self.capacity.sees_itself:
                assert not first < stop <= last, "a row ends within an image"


def media_of(new: NewSequence) -> tuple[MediaItem, ...]:
    found = PromptMedia.find(new.parts)
    return found.items if found is not None else ()


def _shown(new: NewSequence) -> tuple[int, ...]:
    prompt = new.token_ids[: len(new.token_ids) - new.num_generated]
    return (*content_of(prompt, media_of(new)), *new.token_ids[len(prompt) :])


class ImageReplica(FakeReplica):
    """A replica that takes images."""

    def __init__(self, capacity: ImageCapacity = CAPACITY, **settings: object) -> None:
        super().__init__(images=capacity, **settings)  # type: ignore[arg-type]
        core = self.core
        self.encoder = ImageExecutor(core.cache.num_blocks, core.limits.block_size, capacity)
        self.executor = self.encoder
        self.answers: dict[int, list[int]] = {}

    def ask(self, parts: Sequence[Part], seq_ids: int | Sequence[int], max_tokens: int = 4) -> None:
        """Add a request about images; see `check_answers`."""
        token_ids, media = prompt_of(parts)
        self.add(token_ids, seq_ids, max_tokens=max_tokens, media=media)
        for seq_id in (seq_ids,) if isinstance(seq_ids, int) else seq_ids:
            self.answers[seq_id] = expected(content_of(token_ids, media), max_tokens)

    def check_answers(self) -> None:
        assert self.outputs == self.answers


def test_key_ids_differ_by_image_and_grow_with_the_tokens() -> None:
    token_ids, media = prompt_of([1, "a", 2, "b"])
    keys = KeyIds(token_ids, place(media, token_ids))
    token_ids += [7, 8]
    assert len(keys) == len(token_ids) == 12
    assert [key < 1 << 62 for key in keys] == [token != PLACEHOLDER for token in token_ids]
    assert [keys[index] for index in range(12)] == keys[:] == list(keys)
    assert (keys[-1], keys[3:6], keys[10:]) == (8, [keys[3], 2, keys[5]], [7, 8])
    assert len(set(keys)) == len(token_ids), "each part of an image has a key of its own"
    other, others = prompt_of([1, "a", 2, "b"])
    same = KeyIds(other, place(others, other))
    assert same != keys
    other += [7, 8]
    assert same == keys
    resized = tuple(replace(item, num_tokens=item.num_tokens - 1) for item in media)
    assert KeyIds(other, place(resized, other))[1] != keys[1], "a key depends on the tokens' number"


def test_images_split_by_other_tokens_are_found() -> None:
    tokens = [9, PLACEHOLDER, PLACEHOLDER, 3, PLACEHOLDER, PLACEHOLDER, 4, PLACEHOLDER]
    first, second = MediaItem("a", 1, 3, 1, 1), MediaItem("b", 5, 2, 1, 1)
    assert first.places(tokens) == [1, 2, 4]
    assert second.places(tokens) == [5, 7]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_many_requests_about_one_image_encode_it_once(cache_type: CacheType) -> None:
    replica = ImageReplica(cache_type=cache_type, num_blocks=256)
    for number in range(100):
        replica.ask([1, 2, "c", 3, number % 40], number)
    replica.run()
    replica.check_answers()
    assert replica.encoder.encoded == ["c"]
    assert replica.images is not None
    assert replica.images.take_encoded() == 1
    assert replica.images.num_tokens == IMAGES["c"]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_equal_placeholders_share_no_kv(cache_type: CacheType) -> None:
    replica = ImageReplica(cache_type=cache_type)
    replica.ask([1, "a", 2], 1)
    replica.run()
    for token_id, name in ((ord("d"), "d"), (ord("e"), "e")):
        IMAGES.setdefault(name, IMAGES["a"])
        replica.ask([1, name, 2], token_id)
    replica.run()
    replica.check_answers()
    replica.ask([1, "a", 2], 2)
    replica.run()
    replica.check_answers()
    assert replica.encoder.encoded == ["a", "d", "e"]


def test_samples_of_a_prompt_share_its_image() -> None:
    replica = ImageReplica()
    replica.ask([1, "a", 2], (1, 2, 3))
    replica.run()
    replica.check_answers()
    assert replica.encoder.encoded == ["a"]
    assert replica.log[0].num_tokens == (5, 0, 0)


def test_an_image_beyond_the_budget_waits_for_the_next_step() -> None:
    replica = ImageReplica(max_batch_size=4)
    replica.ask([1, "b", 2, "c", 3], 1)
    replica.ask([4, 5], 2)
    replica.plan()
    first = replica.log[0]
    assert [item.id for item in read(first).encodes] == ["b"]
    assert dict(zip(first.seq_ids, first.num_tokens, strict=True)) == {1: 7, 2: 2}
    replica.run()
    replica.check_answers()


def test_embeddings_that_new_weights_make_invalid_are_encoded_again() -> None:
    """In the midst of an image, which the sequence goes on with."""
    replica = ImageReplica(max_tokens_per_batch=4, max_batch_size=4)
    replica.ask([1, "c", 2], 1)
    replica.steps(1, ahead=1)
    replica.change_weights(1, "keep")
    replica.run()
    replica.check_answers()
    assert replica.encoder.encoded == ["c", "c"]


def test_a_preempted_sequence_encodes_dropped_images_again() -> None:
    replica = ImageReplica(max_tokens_per_batch=4, max_batch_size=4)
    replica.ask([1, "c", 2], 1)
    replica.steps(1, ahead=1)
    replica.core.pause_sequences([1])
    replica.retire_all()
    replica.ask([3, "b", 4], 2)
    replica.run()
    assert replica.encoder.encoded == ["c", "b"], "both don't fit into the cache"
    replica.core.resume_sequences([1])
    replica.run()
    replica.check_answers()
    assert replica.encoder.encoded == ["c", "b", "c"]


def test_an_image_that_sees_itself_is_never_cut() -> None:
    """It waits until a step has room; what comes later waits behind it."""
    replica = ImageReplica(SEES_ITSELF, max_tokens_per_batch=9, max_batch_size=4)
    replica.ask([5], 1, max_tokens=6)
    replica.ask([6], 2, max_tokens=6)
    replica.steps(1, ahead=1)
    replica.ask([1, 2, "c", 3], 3)
    replica.ask([7], 4)
    replica.run()
    replica.check_answers()
    rows = [dict(zip(plan.seq_ids, plan.num_tokens, strict=True)) for plan in replica.log]
    assert [row[3] for row in rows if 3 in row][:2] == [2, 9], "up to the image, then all of it"
    assert next(i for i, row in enumerate(rows) if 4 in row) > next(
        i for i, row in enumerate(rows) if row.get(3) == 9
    )


def test_an_image_that_sees_itself_may_exceed_the_budget_of_scored_prompts() -> None:
    IMAGES["large"] = MAX_SCORED_TOKENS + 9
    replica = ImageReplica(ImageCapacity(400, 400, True), num_blocks=99, max_tokens_per_batch=400)
    token_ids, media = prompt_of([1, "large", 2])
    replica.add(token_ids, 1, max_tokens=1, prompt_logprobs=0, media=media)
    replica.run(100)
    assert replica.outputs == {1: expected(content_of(token_ids, media), 1)}


def test_sessions_find_the_kv_of_images() -> None:
    replica = ImageReplica()
    for seq_id, name in ((1, "c"), (2, "c"), (3, "other c")):
        IMAGES.setdefault(name, IMAGES["c"])
        token_ids, media = prompt_of([1, 2, 3, name, 4])
        session = KVSession(id="chat", after="pin", ttl_s=60)
        replica.add(token_ids, seq_id, max_tokens=1, session=session, media=media)
        replica.run()
        replica.check()
    starts = [new.num_cached for plan in replica.log for new in plan.new]
    assert starts == [0, 11, 3]
    assert replica.core.load()["kv_pinned"] == 3


def test_kv_without_its_image_is_not_shared_and_the_image_is_tried_again() -> None:
    replica = ImageReplica()
    replica.ask([1, "a", 2, 3], 1)
    replica.plan()
    result = replica.executor.execute(replica.plans.popleft())
    replica.core.absorb(with_sections(result, ImagesResult((1,))).summary())
    replica.core.stop([1])
    replica.ask([1, "a", 2, 3], 2)
    replica.run()
    assert replica.outputs[2] == replica.answers[2]
    assert replica.encoder.encoded == ["a", "a"]
    starts = [new.num_cached for plan in replica.log for new in plan.new]
    assert starts == [0, 0]


@pytest.mark.parametrize("capacity", [CAPACITY, SEES_ITSELF], ids=["causal", "sees itself"])
@given(data=st.data())
def test_answers_never_depend_on_concurrent_requests(
    capacity: ImageCapacity, data: st.DataObject
) -> None:
    """Short of blocks, with small budgets, lost plans, new weights, pauses."""
    replica = ImageReplica(
        capacity,
        num_blocks=14,
        block_size=4,
        max_batch_size=4,
        max_tokens_per_batch=data.draw(st.sampled_from((9, 16))),
        cache_type=data.draw(st.sampled_from(CACHE_TYPES)),
        host_slots=data.draw(st.sampled_from((0, 6))),
        kv_events=data.draw(st.booleans()),
    )
    parts = st.lists(st.one_of(st.integers(0, 2), st.sampled_from("abc")), min_size=1, max_size=5)
    version = 0
    for seq_id in range(1, data.draw(st.integers(2, 8)) + 1):
        replica.ask(data.draw(parts), seq_id)
        match data.draw(st.sampled_from(("steps", "plan", "lose", "weights", "pause", "flush"))):
            case "steps":
                replica.steps(data.draw(st.integers(1, 4)))
            case "plan":
                replica.plan()
            case "lose":
                replica.plan()
                replica.lose_plans()
            case "weights":
                version += 1
                mode = data.draw(st.sampled_from(("keep", "retract")))
                replica.change_weights(version, mode)
            case "pause":
                replica.core.pause_sequences([seq_id])
                replica.retire_all()
                replica.core.resume_sequences([seq_id])
            case "flush":
                replica.core.cache.flush()
        if not replica.plans and replica.images is not None:
            known = dict(replica.images._tokens)
            assert known == replica.encoder.embeddings, "batching knows what there is"
    replica.run()
    replica.check()
    replica.check_answers()
