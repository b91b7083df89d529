"""Images together with everything else: samples, weights, drafts, adapters, bits, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import get_peft_model_state_dict

from nano_inference.bus.control import ImageCapacity, MemoryState, WeightsReady
from nano_inference.bus.parts.images import ImagesResult
from nano_inference.config import AdapterError, EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.parts.images import Images
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.parts.speculation import Speculation
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, adapter_of
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from ...sections import drafts_of
from ...soaking import in_soak
from .driver.speculation.drafting import MadeUpDrafts, VerifyAll
from .models import load
from .recorder import core_as_on_cuda
from .refusals import needs_kernels
from .runner.adapters.making import make_adapter, merged
from .vision import ImageLane, World, id_of, image_lane, stored, world_of
from .vision_models import VOCAB, make_processor, make_vision_model

NEW_TOKENS = 6


@pytest.mark.parametrize("name", [in_soak("llava"), "qwen2_vl"])
def test_samples_share_the_prompt_s_prefill(name: str) -> None:
    world = world_of(name)
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    lane = image_lane(world, block_size=4)
    completions = lane.run([prompt], NEW_TOKENS, samples=3)
    assert completions == [world.generate(prompt, NEW_TOKENS)] * 3
    assert lane.plans[0].num_tokens == (len(prompt.token_ids), 0, 0)
    assert len(lane.encoded) == 1


@pytest.mark.parametrize("name", [in_soak("llava"), "qwen2_vl"])
def test_new_weights_encode_images_again(name: str) -> None:
    world = world_of(name)
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    lane = image_lane(world, block_size=4)
    lane.run([prompt], NEW_TOKENS)
    changed = World(name, model=make_vision_model(name, seed=1))
    lane.core.part(WeightChanges).manager.sync_blocking(changed.model.state_dict(), 1)
    lane.batching.receive(WeightsReady(1, "keep"), 0)
    assert lane.run([prompt], NEW_TOKENS) == [changed.generate(prompt, NEW_TOKENS)]
    assert len(lane.encoded) == 1


def test_released_memory_drops_embeddings() -> None:
    world = world_of("llava")
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    lane = image_lane(world, block_size=4)
    expected = lane.run([prompt], NEW_TOKENS)
    core = lane.core
    assert core.part(Images).of_sequences is not None
    core.part(MemoryRelease).memory.begin_release(["kv_cache"])
    lacks = core.part(MemoryRelease).memory.lacks
    lane.batching.receive(MemoryState(lacks, ("kv_cache",)), 0)
    lane.finish()
    assert not core.part(Images).of_sequences.embeddings._kept
    core.part(MemoryRelease).resume(["kv_cache"])
    lane.batching.receive(MemoryState(()), 0)
    assert lane.run([prompt], NEW_TOKENS) == expected
    assert len(lane.encoded) == 1


@pytest.mark.parametrize(
    ("name", "right"),
    [("llava", 0.9), ("qwen2_vl", 0.0), in_soak("llava", 0.0), in_soak("qwen2_vl", 0.9)],
)
def test_drafts_change_no_token(name: str, right: float) -> None:
    # Its own: by chance a wrong draft is right, with other prompts.
    world = World(name)
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    expected = world.generate(prompt, NEW_TOKENS)
    lane = image_lane(world, block_size=4, speculation="auto", max_draft_tokens=4)
    core = lane.core
    source = MadeUpDrafts({1: expected.token_ids}, right, core.model.vocab_size)
    speculator = Speculator(core._table, core.constraints, [source], VerifyAll())
    core.part(Speculation).use(speculator)
    assert lane.run([prompt], NEW_TOKENS) == [expected]
    drafts = [draft for result in lane.results for draft in drafts_of(result)]
    assert drafts
    assert any(draft.num_accepted for draft in drafts) == bool(right)


def test_recorded_steps_have_the_positions_after_images() -> None:
    """M-RoPE: a generated token's position is not its index."""
    world = world_of("qwen2_vl")
    prompts = [world.prompt(world.text(3), stored(1), world.text(2)), world.prompt(world.text(5))]
    config = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=4)
    core = core_as_on_cuda(config, world.loaded(), graphs=True)
    lane = ImageLane(config, core, world)
    expected = [world.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert lane.run(prompts, NEW_TOKENS) == expected
    assert core.state.steps.graphs is not None
    assert sum(core.state.steps.graphs.replays.values()) == NEW_TOKENS - 1


@pytest.mark.parametrize("name", ["llava", in_soak("qwen2_vl")])
def test_adapters_of_the_language_part(name: str) -> None:
    world = world_of(name)
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    lane = image_lane(world, block_size=4)
    core = lane.core
    made = make_adapter(world.model, 1, target_modules=r".*language_model.*\.(q_proj|up_proj)")
    put_adapter(core, made)
    lane.batching.restart(core.capacity())
    adapted = World(name, model=merged(made))
    assert lane.run([prompt], NEW_TOKENS) != lane.run([prompt], NEW_TOKENS, adapter="a")
    lane.batching.cache.flush()
    found = lane.run([prompt], NEW_TOKENS, adapter="a")
    assert found == [adapted.generate(prompt, NEW_TOKENS)]
    with pytest.raises(AdapterError, match=r"LoRA on 'model\.v.* is not supported, only on linear"):
        vision = r".*vision.*\.(fc1|q_proj)|.*visual.*\.fc1"
        put_adapter(core, make_adapter(world.model, 2, target_modules=vision))


def put_adapter(core: ExecutorCore, made: Any) -> None:
    tensors, config = get_peft_model_state_dict(made), made.peft_config["default"].to_dict()
    core.runner.adapters.put(adapter_of("a", 1, tensors, config, core.model, AdapterLimits()))


# --- deterministic mode -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "deterministic", "dtype"),
    [
        ("llava", "auto", torch.bfloat16),
        ("qwen2_vl", "auto", torch.float32),
        in_soak("qwen2_vl", True, torch.bfloat16),
        in_soak("qwen3_vl", True, torch.float32),
        in_soak("gemma3", True, torch.float32),
    ],
)
def test_bits_do_not_depend_on_the_batch(
    name: str, deterministic: bool | str, dtype: torch.dtype
) -> None:
    changes: dict[str, int] = {}
    if deterministic == "auto":
        needs_kernels(dtype)
        # With heads of 32 the kernels compute it as a whole.
        changes = {"num_attention_heads": 1, "head_dim": 32}
    world = World(name, model=make_vision_model(name, **changes).to(dtype))
    prompts = [
        world.prompt(world.text(3), stored(1), world.text(2)),
        world.prompt(world.text(2), stored(2, 16, 32), world.text(7), stored(1), world.text(3)),
        world.prompt(world.text(8)),
    ]
    settings: dict[str, Any] = {"deterministic": deterministic, "block_size": 4}
    if name == "gemma3":
        settings["max_tokens_per_batch"] = 64
    alone = []
    for prompt in prompts:
        lane = image_lane(world, **settings)
        assert "deterministic" not in lane.core.off
        alone += lane.run([prompt], NEW_TOKENS)
    together = image_lane(world, **settings).run(prompts, NEW_TOKENS)
    small = {**settings, "max_tokens_per_batch": 19, "preempt_every": 3, "flush_every": 2}
    cut = image_lane(world, **small).run(prompts, NEW_TOKENS)
    if dtype is torch.float32:
        assert alone == [world.generate(prompt, NEW_TOKENS) for prompt in prompts]
    for one, other, third in zip(alone, together, cut, strict=True):
        assert one.logprobs == other.logprobs == third.logprobs
        assert one.token_ids == other.token_ids == third.token_ids


# --- images that can't be used ----------------------------------------------------------------


def test_a_missing_image_ends_its_request_and_spoils_no_cache() -> None:
    world = World("llava")
    image = stored(1)
    prompt = world.prompt(world.text(3), image, world.text(2))
    lane = image_lane(world, block_size=4)
    kept = world.images.pop(prompt.media[0].name)
    lane.run([prompt], NEW_TOKENS)
    (failed,) = lane.results[0].failed
    assert (failed.status, failed.code) == ("error", "invalid_image")
    assert failed.message == "the image is not stored any more; send it again"
    images = ImagesResult.find(lane.results[0].parts)
    assert images is not None
    assert len(images.spoiled) == 1
    world.images[prompt.media[0].name] = kept
    assert lane.run([prompt], NEW_TOKENS) == [world.generate(prompt, NEW_TOKENS)]
    assert list(lane.cached.values()) == [0]
    assert lane.encoded == [id_of(image)]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_an_image_with_other_tokens_than_placeholders_ends_its_request(name: str) -> None:
    world = world_of(name)
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    (item,) = prompt.media
    prompt.token_ids.pop(item.start)
    prompt.media = (replace(item, num_tokens=item.num_tokens - 1),)
    lane = image_lane(world, block_size=4)
    lane.run([prompt], NEW_TOKENS)
    (failed,) = (cancel for result in lane.results for cancel in result.failed)
    assert failed.code == "invalid_image"
    assert "placeholders" in failed.message


def test_images_without_a_token_between_end_their_request() -> None:
    """Transformers can't tell them apart, where positions depend on their sizes."""
    world = world_of("qwen2_vl")
    prompt = world.prompt(world.text(3), stored(1), stored(2, 16, 32), world.text(2))
    first, second = prompt.media
    del prompt.token_ids[first.start + first.num_tokens : second.start]
    prompt.media = first, replace(second, start=first.start + first.num_tokens)
    lane = image_lane(world, block_size=4)
    lane.run([prompt], NEW_TOKENS)
    (failed,) = (cancel for result in lane.results for cancel in result.failed)
    assert failed.code == "invalid_image"
    assert failed.message.startswith("the images don't fit their placeholders")


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_vision_model("llava").save_pretrained(tmp_path)
    make_processor("llava").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_with_an_image_processor_takes_images(folder: Path) -> None:
    world = World("llava")
    prompt = world.prompt(world.text(3), stored(1), world.text(2))
    lane = image_lane(world, load(folder, max_model_len=256), block_size=4)
    assert lane.run([prompt], NEW_TOKENS) == [world.generate(prompt, NEW_TOKENS)]
    capacity = lane.core.capacity()
    images = ImageCapacity.find(capacity.parts)
    assert images is not None
    assert (images.max_tokens, images.sees_itself) == (256, False)
    (folder / "preprocessor_config.json").unlink()
    text_only = load(folder)
    assert text_only.vision is None
    assert (
        ImageCapacity.find(ExecutorCore(EngineConfig(), model=text_only).capacity().parts) is None
    )


def test_settings_that_images_exclude_are_refused_at_load(folder: Path) -> None:
    with pytest.raises(ModelError, match="takes images, which one rank alone encodes"):
        load_sharded(EngineConfig(model_path=str(folder), device="cpu"), OneRank())
    model = make_vision_model("llava", placeholder=VOCAB)
    with pytest.raises(ModelError, match="the image token 131 of LlavaForConditionalGeneration is"):
        wrap_model(model, 64, image_processor=make_processor("llava"))
