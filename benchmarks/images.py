"""Questions about images, beside Transformers' `generate`, on random weights.

    python benchmarks/images.py [--images 16] [--asked 100] [--turns 3] [--threads 1] [--json FILE]

A LLaVA with a tower of 6 layers (width 384, pictures of 224 pixels, 256 tokens each) and a Llama of
8 layers (width 512), in float32, with the tokenizer of the bundled vision model. "many" asks one
question about each of several pictures, "one" many questions about a single picture; an answer has
32 tokens. Both sides get PIL images and token ids, and do all that follows. `generate` gets whole
batches, whose prompts have one length. Within a turn the sides alternate; the engine starts each
turn with empty caches. Greedy tokens have to be equal.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import against, options, print_table, record, rotated
from PIL import Image
from transformers import (
    AutoTokenizer,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessorPil,
)

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

SIDE, PATCH = 224, 14
QUESTION, ANSWER = 24, 32
BATCH = 16


def write_model(folder: Path) -> Any:
    """Write the model; return its processor."""
    from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig

    tokenizer = AutoTokenizer.from_pretrained(EngineConfig(model_path="tiny-vision").model_folder)
    torch.manual_seed(1)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=384,
            intermediate_size=1536,
            num_attention_heads=6,
            num_hidden_layers=6,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=512,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_hidden_layers=8,
            max_position_embeddings=2048,
            initializer_range=0.2,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor = LlavaProcessor(
        SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
    )
    processor.save_pretrained(folder)
    return processor


Work = tuple[list[list[int]], list[Image.Image]]
"""Questions as token ids, and the picture of each."""


def workload(number: int, pictures: int, vocab_size: int, rng: random.Random) -> Work:
    """Return random questions about random pictures, taken in turn."""
    found = [
        Image.frombytes("RGB", (320, 240), rng.randbytes(320 * 240 * 3)) for _ in range(pictures)
    ]
    asked = [[rng.randrange(20, vocab_size) for _ in range(QUESTION)] for _ in range(number)]
    return asked, [found[place % pictures] for place in range(number)]


class Peer:
    """Transformers' own model and processor."""

    def __init__(self, folder: Path, processor: Any, placeholder: int) -> None:
        self._processor, self._placeholder = processor, placeholder
        self._model: Any = LlavaForConditionalGeneration.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, work: Work) -> list[list[int]]:
        found: list[list[int]] = []
        image = [self._placeholder] * (SIDE // PATCH) ** 2
        for begin in range(0, len(work[0]), BATCH):
            asked, pictures = (part[begin : begin + BATCH] for part in work)
            pixels = self._processor.image_processor(pictures, return_tensors="pt").pixel_values
            ids = torch.tensor([image + question for question in asked])
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels,
                do_sample=False,
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                pad_token_id=0,
            )
            found += output[:, ids.shape[1] :].tolist()
        return found


class Ours:
    """The engine."""

    def __init__(self, folder: Path, placeholder: int) -> None:
        config = EngineConfig(
            model_path=str(folder), dtype="float32", max_batch_size=BATCH, deterministic=False
        )
        self._placeholder = placeholder
        self._engine = InferenceEngine(config)

    def __call__(self, work: Work) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        prompts = [[self._placeholder, *question] for question in work[0]]
        samples = self._engine.generate(prompts, sampling, images=work[1])
        return [list(sample.completion_tokens) for sample in samples]


def main() -> None:
    arguments = options(
        __doc__,
        images=(16, "different pictures of `many`"),
        asked=(100, "questions of `one`"),
        turns=3,
        threads=(1, "of torch"),
    ).parse_args()
    torch.set_num_threads(arguments.threads)
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processor = write_model(folder)
        tokenizer = processor.tokenizer
        placeholder = tokenizer.convert_tokens_to_ids("<image>")
        sides: dict[str, Callable[[Work], list[list[int]]]] = {
            "ours": Ours(folder, placeholder),
            "generate": Peer(folder, processor, placeholder),
        }
        for turn in range(arguments.turns + 1):
            # New pictures in each turn, so that nothing of them is cached; turn 0 warms up.
            rng = random.Random(turn)
            for kind, sizes in {
                "many": (arguments.images, arguments.images),
                "one": (arguments.asked, 1),
            }.items():
                work = workload(*sizes, len(tokenizer) - 8, rng)
                answers = {}
                for side in rotated(sides, turn):
                    start = time.perf_counter()
                    answers[side] = sides[side](work)
                    took = time.perf_counter() - start
                    if turn:
                        times.setdefault(kind, {}).setdefault(side, []).append(took)
                equal = sum(a == b for a, b in zip(*answers.values(), strict=True))
                print(f"turn {turn}, {kind}: {equal} of {len(work[0])} answers equal", flush=True)
    rows = {
        f"{kind}, {side}": against(took, of["generate"])
        for kind, of in times.items()
        for side, took in of.items()
    }
    print_table({"seconds": "{median:.2f}", "x generate": "{ratio:.3f}"}, rows)
    record(arguments, times_s=times)


if __name__ == "__main__":
    main()
