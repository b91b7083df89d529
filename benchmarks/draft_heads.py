"""Acceptance and gain of a draft head, trained here for the bundled model.

    python benchmarks/draft_heads.py [--steps 1500] [--head DIR] [--turns 6] [--threads 1]
        [--json FILE]

An EAGLE-3 head for `models/tiny` is trained on that model's own probabilities over its training
text, two positions ahead and then, over its own states, one further at a time (`DEPTH` in all); or
read from `--head`, where it is written otherwise. Then the model answers held-out prompts with the
head alone as the source of drafts: forced at any cost, for its acceptance; and as measured
costs decide. `x off` is tokens per second over those without, of engines in turn.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from harness import options, print_table, record, rotated
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.bundled_models import tasks
from examples.bundled_models.evaluation import kinds_of
from examples.bundled_models.rows import Batch, Packer, Taps
from examples.bundled_models.settings import TrainingSettings
from examples.bundled_models.tokenizer import prompt_text
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.executor.driver.speculation import control
from nano_inference.stages.executor.runner.heads.eagle3 import Eagle3Head

MODEL = EngineConfig().model_folder
READS = (1, 3, 5)
DEPTH = 3
RATE, WARMUP = 2e-3, 50
PROMPTS, TOKENS = 64, 96


def fields() -> dict[str, object]:
    """Return the head's config.json."""
    own = json.loads((MODEL / "config.json").read_text())
    taken = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    taken += ("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pad_token_id": None,
        "draft_vocab_size": own["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(READS),
        **{name: own[name] for name in taken},
    }


class HeadTrainer:
    """A head in training, beside its target."""

    def __init__(self) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.target.requires_grad_(False)
        config = LlamaConfig(**fields(), draft_reads=READS, attn_implementation="sdpa")
        self.head = Eagle3Head(config)
        self.head.set_input_embeddings(self.target.get_input_embeddings())
        self.states: dict[int, Tensor] = {}
        for layer in READS:
            self.target.model.layers[layer - 1].register_forward_hook(
                lambda *call, layer=layer: self.states.update({layer: call[2]})
            )
        self.parameters = [each for each in self.head.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, RATE, (0.9, 0.98))

    def loss(self, batch: Batch) -> tuple[Tensor, float]:
        """Return the loss of a batch, and the share of likeliest tokens that it finds first."""
        with torch.no_grad():
            call = {"attention_mask": batch.mask, "position_ids": batch.positions}
            logits = self.target(input_ids=batch.tokens, use_cache=False, **call).logits
        read = [self.states[layer] for layer in READS]
        # Position p takes the state there and the token after it.
        places, mask = batch.positions[:, :-1], batch.mask
        mask = None if mask is None else mask[:, :, :-1, :-1]
        states, given = self.head.fold(read)[:, :-1], batch.tokens[:, 1:]
        # Documents end in between.
        learn = (batch.positions[:, 1:] > 0) & batch.learn[:, 1:].bool()
        wanted = logits[:, 1:]
        total, right = torch.zeros(()), 0.0
        for depth in range(DEPTH):
            embeddings = self.head.get_input_embeddings()(given)
            after = self.head.model(
                inputs_embeds=states,
                token_embeddings=embeddings,
                attention_mask=mask,
                position_ids=places,
                use_cache=False,
            )[0]
            found = self.head.lm_head(self.head.norm(after))[learn]
            target = wanted[learn]
            total = total + 0.8**depth * F.cross_entropy(found, target.softmax(-1))
            if not depth:
                right = float((found.argmax(-1) == target.argmax(-1)).float().mean())
            # Further on, a position's state is the head's own of the position before.
            states = torch.cat((states[:, :1], after[:, :-1]), 1)
            learn = learn & (places > depth + 1)
        return total, right

    def train(self, steps: int, folder: Path) -> None:
        """Train, and write the head."""
        settings = TrainingSettings(seed=7, rows=4)
        taps = Taps(settings)
        taps.stage = 2
        taps.weights = {kind: taps.weight(kind) for kind in taps.weights}
        packer = Packer(settings, AutoTokenizer.from_pretrained(MODEL), taps)
        shares: list[float] = []
        for step in range(steps):
            half = 0.5 * (1 + math.cos(math.pi * step / steps))
            rate = RATE * min((step + 1) / WARMUP, half)
            self.optimizer.param_groups[0]["lr"] = rate
            loss, right = self.loss(packer.batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            shares.append(right)
            if (step + 1) % 100 == 0:
                print(f"{step + 1:5d} loss {loss:.3f} first {statistics.mean(shares[-100:]):.3f}")
        own = {
            name.replace("model.layers.0.", "midlayer."): each.contiguous()
            for name, each in self.head.state_dict().items()
            if "embed_tokens" not in name
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(own, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fields(), indent=2))


def prompts() -> list[str]:
    """Return held-out prompts of all kinds."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    kinds = kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS)
    found = [each for kind in kinds for each in tasks.distinct(*kind, "heldout", 20, 1)]
    random.Random(1).shuffle(found)
    return [prompt_text(tokenizer, each) for each in found[:PROMPTS]]


def engine_of(head: Path | None) -> InferenceEngine:
    """Return an engine that drafts by a head alone; None: without speculation."""
    config = EngineConfig(max_model_len=1024, kv_cache_bytes=1 << 27)
    if head is not None:
        config = msgspec.structs.replace(
            config, speculation="auto", draft_sources=(), draft_model_path=str(head)
        )
    return InferenceEngine(config)


def main() -> None:
    arguments = options(
        __doc__, steps=1500, head=(Path, "folder of the head"), turns=6, threads=1
    ).parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    folder = arguments.head or Path(tempfile.mkdtemp())
    if not (folder / "config.json").exists():
        HeadTrainer().train(arguments.steps, folder)
    texts = prompts()
    rows: dict[str, dict[str, float]] = {}
    least = control.LEAST_GAIN
    engines = {"off": engine_of(None), "forced": engine_of(folder), "auto": engine_of(folder)}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=1)
        for together in (1, 16):
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            outputs: dict[str, list[tuple[int, ...]]] = {}
            counts = dict.fromkeys(engines, (0, 0, 0))
            for turn in range(arguments.turns + 1):
                for name in rotated(engines, turn):
                    control.LEAST_GAIN = -math.inf if name == "forced" else least
                    engine, tokens, samples = engines[name], 0, []
                    begin = time.perf_counter()
                    for start in range(0, 16 if together == 1 else PROMPTS, together):
                        samples += engine.generate(texts[start : start + together], params)
                    seconds = time.perf_counter() - begin
                    tokens = sum(len(each.completion_tokens) for each in samples)
                    outputs[name] = [tuple(each.completion_tokens) for each in samples]
                    if turn:
                        speeds[name].append(tokens / seconds)
                    drafted = sum(each.num_draft_tokens for each in samples)
                    accepted = sum(each.num_accepted_draft_tokens for each in samples)
                    counts[name] = drafted, accepted, tokens
                assert outputs["off"] == outputs["forced"] == outputs["auto"]
            for name in ("forced", "auto"):
                drafted, accepted, tokens = counts[name]
                pairs = zip(speeds[name], speeds["off"], strict=True)
                rows[f"{name}, temperature {temperature:g}, {together} at once"] = {
                    "acceptance": accepted / max(drafted, 1),
                    "per_step": tokens / max(tokens - accepted, 1),
                    "x_off": statistics.median(own / off for own, off in pairs),
                }
    columns = {
        "acceptance": "{acceptance:.1%}",
        "tokens per step": "{per_step:.2f}",
        "x off": "{x_off:.2f}",
    }
    print_table(columns, rows)
    record(arguments, rows=rows)


if __name__ == "__main__":
    main()
