"""Prompts with images for small models, and Transformers' own answers to them."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from nano_inference.bus.media import MediaItem
from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.bus.parts.images import PromptMedia
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.media import decode_process
from nano_inference.media.decode_process import features_of
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model
from nano_inference.stages.executor.driver.step import LaunchedStep
from nano_inference.stages.executor.parts.images import Images
from nano_inference.store.images import StoredImage

from ...sections import read
from .lane import StepLane
from .report import MAX_DIFFERENCE
from .vision_models import (
    END,
    PLACEHOLDER,
    START,
    TILE,
    make_processor,
    make_vision_model,
    picture,
)

_NESTED = ("idefics3", "llava_onevision", "smolvlm")
_OPTIONS: dict[str, dict[str, Any]] = {"internvl": {"crop_to_patches": True}}
_TILED = ("idefics3", "smolvlm")
_CUT = (*_TILED, "mistral3")
"""An image has other tokens between those of embeddings."""
_TILE_TOKENS = 4


@dataclass
class ImagePrompt:
    """A prompt, its images, and Transformers' inputs for it."""

    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Completion:
    """Tokens and their logprobs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """Compare tokens, and logprobs up to rounding."""
        assert isinstance(other, Completion)
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        near = all(abs(one - two) < MAX_DIFFERENCE for one, two in pairs)
        return self.token_ids == other.token_ids and near

    __hash__ = None  # type: ignore[assignment]


def stored(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """A random image."""
    return Image.fromarray(picture(seed, width, height))


def id_of(image: Image.Image) -> str:
    return decode_process.id_of(*image.size, image.tobytes())


class World:
    """A small model with its images.

    Attributes:
        model: With Transformers' own attention.
        images: All images so far, by name.
    """

    def __init__(self, name: str, model: Any = None) -> None:
        """`model`: of this name; a new one if None."""
        self.name = name
        self.model = model or make_vision_model(name)
        self.processor = make_processor(name)
        self.images: dict[str, StoredImage] = {}
        self._text = random.Random(name)

    def loaded(self, max_model_len: int = 256) -> LoadedModel:
        """The model with our attention."""
        module = copy.deepcopy(self.model)
        return wrap_model(module, max_model_len, image_processor=self.processor)

    def text(self, number: int) -> list[int]:
        """Random tokens."""
        return [self._text.randrange(1, PLACEHOLDER) for _ in range(number)]

    @torch.no_grad()
    def prompt(self, *parts: list[int] | Image.Image) -> ImagePrompt:
        """A prompt of tokens and images."""
        images = [part for part in parts if isinstance(part, Image.Image)]
        if not images:
            return ImagePrompt([token for part in parts for token in part])
        arrays = [np.asarray(image) for image in images]
        inputs = dict(
            self.processor(
                [arrays] if self.name in _NESTED else arrays,
                return_tensors="pt",
                **_OPTIONS.get(self.name, {}),
            )
        )
        patches = inputs.pop("num_patches", None)
        for unused in ("num_crops", "num_soft_tokens_per_image"):
            inputs.pop(unused, None)
        counts = self._counts(inputs, images, patches)
        token_ids: list[int] = []
        media: list[MediaItem] = []
        for part in parts:
            if not isinstance(part, Image.Image):
                token_ids += part
                continue
            number = counts[len(media)]
            token_ids.append(START)
            start = len(token_ids)
            if self.name in _CUT:
                start += 1
                for first in range(0, number, _TILE_TOKENS):
                    rest = min(number - first, _TILE_TOKENS)
                    token_ids += [TILE, *[PLACEHOLDER] * rest]
            else:
                token_ids += [PLACEHOLDER] * number
            token_ids.append(END)
            alone = len(images) == 1
            name = id_of(part)
            if self.name == "llava_onevision" and not alone:
                name += " in company"
            media.append(MediaItem(id_of(part), start, number, *part.size, alone, name))
            features = features_of(self.processor, _OPTIONS.get(self.name, {}), part, alone=alone)
            self.images[name] = StoredImage(*part.size, features)
        kinds = (torch.tensor([token_ids]) == PLACEHOLDER).int()
        takes = inspect.signature(self.model.forward).parameters
        for kind in {"mm_token_type_ids", "token_type_ids"}.intersection(takes):
            inputs[kind] = kinds
        return ImagePrompt(token_ids, tuple(media), inputs)

    def _counts(self, inputs: Mapping[str, Any], images: Sequence[Any], patches: Any) -> list[int]:
        dtype = self.model.dtype
        given = {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs.items()}
        features = self.model.model.get_image_features(**given).pooler_output
        if self.name == "internvl":
            return (patches * _TILE_TOKENS).tolist()
        if self.name not in _TILED:
            return [len(each) for each in features]
        if len(images) == 1:
            return [len(features[0])]
        alone = [self.prompt(image).media[0].num_tokens for image in images]
        assert sum(alone) == len(features[0])
        return alone

    @torch.no_grad()
    def generate(self, prompt: ImagePrompt, new_tokens: int) -> Completion:
        """Transformers' greedy tokens."""
        ids = torch.tensor([prompt.token_ids])
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
            **prompt.inputs,
        )
        tokens = output.sequences[0, len(ids[0]) :]
        logits = torch.stack(output.logits, dim=1)[0].double()
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 2 * MAX_DIFFERENCE, "a near tie"
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return Completion(tokens.tolist(), logprobs.tolist())


@cache
def world_of(name: str) -> World:
    return World(name)


class ImageLane(StepLane):
    """Runs prompts with images greedily, all queued at once.

    Attributes:
        plans: All of the last run.
        cached: For each prompt of the last run, the tokens found in the cache at its first start.
    """

    def __init__(self, config: EngineConfig, core: ExecutorCore, world: World, **more: Any) -> None:
        super().__init__(config, core, **more)
        self._world = world
        self._next_id = 1
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.cached: dict[int, int] = {}

    def begin(self, plan: StepPlan) -> LaunchedStep | StepResult:
        self.core.part(Images).give(self._world.images)
        return super().begin(plan)

    def run(
        self,
        prompts: Sequence[ImagePrompt],
        new_tokens: int,
        sampling: SamplingParams | None = None,
        samples: int = 1,
        adapter: str = "",
    ) -> list[Completion]:
        """Each prompt's completions, one sample after the other."""
        self.steps = self.preempted = self.flushed = 0
        self.plans, self.results, self.cached = [], [], {}
        self._completions: dict[int, Completion] = {}
        sampling = sampling or SamplingParams(temperature=0.0, max_tokens=new_tokens)
        for prompt in prompts:
            specs = []
            for index in range(samples):
                self._completions[self._next_id] = Completion()
                specs.append(SequenceSpec(self._next_id, index, seed=self._next_id))
                self._next_id += 1
            info = RequestInfo(f"r{self._next_id}", "e", adapter=adapter)
            self.batching.add(
                AdmittedRequest(
                    info,
                    Prompt(tuple(prompt.token_ids)),
                    sampling,
                    tuple(specs),
                    "",
                    0,
                    parts=(PromptMedia(prompt.media),),
                )
            )
        self.finish()
        return list(self._completions.values())

    def record(self, plan: StepPlan, result: StepResult) -> None:
        self.plans.append(plan)
        self.results.append(result)
        for new in plan.new:
            self.cached.setdefault(new.seq_id, new.num_cached)
        sampled = zip(result.seq_ids, result.token_ids, result.logprobs, strict=True)
        for seq_id, token, logprob in sampled:
            self._completions[seq_id].token_ids.append(token)
            self._completions[seq_id].logprobs.append(logprob)

    @property
    def encoded(self) -> list[str]:
        """Ids of the images that the last run encoded, in order."""
        return [item.id for plan in self.plans for item in read(plan).encodes]


def image_lane(world: World, model: LoadedModel | None = None, **settings: Any) -> ImageLane:
    """A lane of a small model; `preempt_every` and `flush_every` are of StepLane."""
    more = {
        name: settings.pop(name) for name in ("preempt_every", "flush_every") if name in settings
    }
    config = EngineConfig(**{"max_batch_size": 8, "kv_cache_bytes": 1 << 22, **settings})
    core = ExecutorCore(config, model=model or world.loaded())
    return ImageLane(config, core, world, **more)
