"""Train the bundled vision model from nothing.

Command, run at the root of the repository, which writes the whole folder `models/tiny-vision` anew:

    python -m examples.bundled_models.vision.train --out models/tiny-vision

The script draws its pictures (`pictures.py`) and asks about them (`questions.py`), trains a
byte-level BPE tokenizer and a small LLaVA model, rounds the weights to bfloat16, measures greedy
exact match on held-out pictures and writes the model card.

At first the vision tower alone learns to name what each patch belongs to: its shape, colour and
digit. The layer that names them is thrown away in the end. Then the whole model learns to answer,
while the tower goes on naming. A row has one picture and several questions about it. In half of the
rows the questions don't see one another, in the others they are turns of one conversation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from transformers import __version__ as transformers_version

from ..evaluation import Model
from ..tokenizer import END_OF_TEXT, PAD, TURN_END, TURN_START, FastTokenizer, train_bpe, wrap
from ..train import edit_json, learning_rate, round_weights
from .evaluation import table
from .pictures import SIDE, make_scene
from .questions import questions
from .rows import IMAGE, LABELS, Batch, Drawer
from .settings import VisionSettings

CARD = Path(__file__).with_name("card.md").read_text(encoding="utf-8")

# Pictures stand before the text of their message, as in LLaVA's own template.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content if part.type == 'image' %}
            {{- '<image>' }}
        {%- endfor %}
        {%- for part in message.content if part.type == 'text' %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(settings: VisionSettings) -> FastTokenizer:
    """Train a tokenizer on questions and answers."""

    def texts() -> Iterator[str]:
        rng = random.Random(f"tokenizer/{settings.seed}")
        yield from ["system\nuser\nassistant\n"] * 100
        for _ in range(2000):
            for each in questions(make_scene(rng, "train"), rng, settings.questions):
                yield f"{each.text}\n{each.answer}"

    special = (END_OF_TEXT, TURN_START, TURN_END, PAD, IMAGE)
    bpe = train_bpe(texts(), settings.vocabulary, special)
    return wrap(bpe, (IMAGE,), chat_template=CHAT_TEMPLATE)


def build_model(settings: VisionSettings, tokenizer: FastTokenizer) -> Model:
    """Return the untrained model."""
    sizes: dict[str, Any] = {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_attention_heads": 4,
    }
    token_id = tokenizer.convert_tokens_to_ids
    ids = {"bos_token_id": None, "eos_token_id": token_id(END_OF_TEXT)}
    ids |= {"pad_token_id": token_id(PAD)}
    text: Any = LlamaConfig
    config: Any = LlavaConfig
    model: Model = LlavaForConditionalGeneration(
        config(
            vision_config=SiglipVisionConfig(
                **sizes,
                num_hidden_layers=settings.vision_layers,
                image_size=SIDE,
                patch_size=settings.patch,
                vision_use_head=False,
            ),
            text_config=text(
                **sizes,
                **ids,
                vocab_size=len(tokenizer),
                num_hidden_layers=settings.layers,
                num_key_value_heads=2,
                max_position_embeddings=2048,
                tie_word_embeddings=True,
                initializer_range=0.05,
            ),
            image_token_index=token_id(IMAGE),
            image_seq_length=settings.image_tokens,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            tie_word_embeddings=True,
            **ids,
        )
    )
    generation: Any = GenerationConfig
    model.generation_config = generation(
        do_sample=False,
        eos_token_id=[token_id(END_OF_TEXT), token_id(TURN_END)],
        pad_token_id=token_id(PAD),
    )
    return model


def build_processor(settings: VisionSettings, tokenizer: FastTokenizer) -> Any:
    """Return the processor: pictures of any size become `SIDE` pixels wide and high."""
    image_processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    make: Any = LlavaProcessor
    return make(
        image_processor,
        tokenizer,
        patch_size=settings.patch,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )


_STATEFUL = ("model", "namer", "optimizer")
_REPORT_EVERY = 50


class Trainer:
    """A model in training and its state. `checkpoint` is the file to save it in."""

    def __init__(
        self,
        settings: VisionSettings,
        model: Model,
        tokenizer: FastTokenizer,
        checkpoint: Path | None = None,
    ) -> None:
        self.settings, self.model, self.checkpoint = settings, model, checkpoint
        self.drawer = Drawer(settings, tokenizer)
        self.namer = torch.nn.Linear(settings.hidden, sum(map(len, LABELS)))
        self.optimizer = torch.optim.AdamW(
            [*model.parameters(), *self.namer.parameters()],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=settings.weight_decay,
        )
        self.step, self.seconds = 0, 0.0

    def see(self, pixels: Tensor) -> Tensor:
        """Return the patches' states that the projector gets: `[pictures, patches, hidden]`."""
        states: Tensor = self.model.model.vision_tower(
            pixels, output_hidden_states=True, return_dict=True
        ).hidden_states[-1]
        return states

    def naming_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of naming what patches belong to."""
        parts = self.namer(states).split([len(each) for each in LABELS], dim=-1)
        losses = [
            F.cross_entropy(part.flatten(0, 1), labels[..., place].flatten())
            for place, part in enumerate(parts)
        ]
        return torch.stack(losses).sum()

    def answering_loss(self, states: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the answers."""
        inner = self.model.model
        inputs = inner.get_input_embeddings()(batch.tokens)
        seen = inner.multi_modal_projector(states)
        places = batch.tokens == self.model.config.image_token_index
        inputs = inputs.masked_scatter(places[..., None], seen)
        states = inner.language_model(
            inputs_embeds=inputs,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=False,
        ).last_hidden_state
        chosen = batch.targets >= 0
        return F.cross_entropy(self.model.lm_head(states[chosen]), batch.targets[chosen])

    def save(self) -> None:
        """Write the checkpoint, if there is a file for it."""
        if self.checkpoint is None:
            return
        state = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= {"rng": self.drawer.rng.getstate(), "step": self.step, "seconds": self.seconds}
        torch.save(state, self.checkpoint)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=False)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.drawer.rng.setstate(state["rng"])
        self.step, self.seconds = state["step"], state["seconds"]

    def update(self) -> float:
        """Make one step; return the loss of the stage."""
        start = time.perf_counter()
        naming = self.settings.naming
        if self.step < naming.steps:
            _, pixels, labels = self.drawer.scenes()
            loss = total = self.naming_loss(self.see(pixels), labels)
            rate = learning_rate(naming, self.step)
        else:
            batch = self.drawer.batch()
            states = self.see(batch.pixels)
            loss = self.answering_loss(states, batch)
            named = self.naming_loss(states, batch.labels)
            total = loss + self.settings.naming_weight * named
            rate = learning_rate(self.settings.answering, self.step - naming.steps)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return loss.item()

    def train(self) -> None:
        """Train the vision tower alone, then the whole model; write checkpoints."""
        self.model.train()
        losses = []
        while self.step < self.settings.steps:
            losses.append(self.update())
            if self.step % _REPORT_EVERY == 0:
                mean, losses = sum(losses) / len(losses), []
                print(f"{self.step:5d} {self.seconds:5.0f} s loss {mean:.4f}", flush=True)
                self.save()


def save(trainer: Trainer, processor: Any, out: Path) -> None:
    """Write model and processor: the weights as bfloat16, to be computed with in float32."""
    out.mkdir(parents=True, exist_ok=True)
    trainer.model.to(torch.bfloat16).save_pretrained(out)
    trainer.model.to(torch.float32)
    processor.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    edit_json(out / "config.json", {"dtype": "float32"})
    edit_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def card(trainer: Trainer, results: str) -> str:
    """Return the text of the model card."""
    settings = trainer.settings
    return CARD.format(
        **asdict(settings),
        image_tokens=settings.image_tokens,
        side=SIDE,
        table=results,
        parameters=f"{sum(p.numel() for p in trainer.model.parameters()):,}",
        steps=settings.steps,
        minutes=f"{trainer.seconds / 60:.0f}",
        torch=torch.__version__.partition("+")[0],
        transformers=transformers_version,
        settings=", ".join(f"{key}={value}" for key, value in asdict(settings).items()),
    )


def main() -> None:
    """Train, evaluate and write the model."""
    parser = argparse.ArgumentParser(description="Train the bundled vision model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--checkpoint", type=Path, help="file to save the state in and go on from")
    arguments = parser.parse_args()
    settings = VisionSettings()
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer(settings)
    processor = build_processor(settings, tokenizer)
    model = build_model(settings, tokenizer)
    trainer = Trainer(settings, model, tokenizer, arguments.checkpoint)
    trainer.resume()
    trainer.train()
    round_weights(trainer.model)
    results = table(settings, trainer.model, processor)
    print(results)
    save(trainer, processor, arguments.out)
    (arguments.out / "README.md").write_text(card(trainer, results), encoding="utf-8")


if __name__ == "__main__":
    main()
