"""The settings of what runs a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from .base import Section

PoolingKind = Literal["mean", "last", "cls"]
"""Of which tokens a prompt's vector is made: of all, the last, the first."""

DraftSourceName = Literal["prediction", "grammar", "suffix", "ngram"]
"""Where drafted tokens come from: what the client expects, what a grammar forces, outputs that went
on from the same tokens, the sample's own earlier tokens."""

BUNDLED_MODEL = "tiny"
"""The `model_path` that names the model shipped inside the package."""


ADAPTER_ID_RULE = "ids of 1 to 128 letters, digits and . _ : / @ + -, the first a letter or digit"

_ADAPTER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def is_adapter_id(id: str) -> bool:
    """Whether requests could name an adapter so: `ADAPTER_ID_RULE`."""
    return _ADAPTER_ID.fullmatch(id) is not None


class EngineConfig(Section, frozen=True, forbid_unknown_fields=True):
    """What one lane runs: the model, its KV cache and the size of its batches.

    Attributes:
        model_path: A folder in Transformers' format, a GGUF file, or "tiny" for the bundled model.
        cache_type: The prefix cache. "radix": a tree of tokens, which finds the longest match with
            any sequence computed; "paged": full blocks found by a chain of hashes.
        block_size: Tokens per KV block.
        max_batch_size: Sequences that run at the same time. 0, the default, stands for 256, and on
            a CPU for 128: there a step takes longer with each of them, and everybody waits for
            steps. `InferenceEngine.config` has the number in use.
        max_model_len: Prompt and completion together, in tokens; the model's own limit applies too.
        gpu_memory_utilization: Share of the device's memory for weights and KV cache (CUDA, XPU).
        kv_cache_bytes: Size of the KV cache on CPU and MPS, once all of it has been used.
        max_tokens_per_batch: Token budget of one step; longer prefills are cut into chunks.
        dtype: "auto" takes the checkpoint's own, and bfloat16 for a GGUF file of quantized weights.
        device: "auto" takes CUDA when there is one, else XPU, else MPS, else the CPU. Otherwise
            torch's name for one, such as "cuda:1"; AMD's are "cuda" too.
        cpu_threads: Threads of steps on CPU, which all of the process then has. 0 takes one in the
            executor's stage for a small model, whose steps are too short to be shared, and else
            those that torch has, by itself one per core.
        kernels: "auto" uses the kernels for bfloat16 and float32 on CPU, which a C compiler makes
            at the first start, where the machine allows it; "off" runs Transformers' modules as
            they are. On CUDA it is the kernel for decode attention.
        attention: The back end of attention. "paged" reads the KV cache in place, and never holds a
            row's scores as a whole (flash attention): our kernel, on CPU for bfloat16 and float32,
            on CUDA Triton's; "gather" gathers keys and values for PyTorch; "tiled" is deterministic
            mode's where "paged" can't be had. "auto" takes the fastest that there is.
        attention_tile: How many positions "paged" takes at a time on CUDA, a power of two from 16
            to 1024; 0 chooses by the width of a head. Refused where there are no tiles.
        cuda_graphs: "auto" records decode steps as CUDA graphs when the model is loaded, and
            replays them (CUDA, with `kernels`); "off" starts each operation of a step by itself.
        huge_pages: "auto" has the weights and the KV cache in large pages of memory where the
            system gives such (CPU, Linux), which one core reads faster; "off" leaves weights where
            they were loaded, which may be the file itself.
        seed: Base of the random numbers of requests that bring no seed.
        logprobs_mode: What reported logprobs are of. "processed": the policy that tokens are
            sampled from, after penalties, bias and temperature; "raw": the model's own output.
        deterministic: Tokens and logprobs are the same, bit for bit, whatever else is in the
            batch, however prompts are chunked, cached or computed again. "auto" has it so where it
            costs nothing: on a CPU, where `kernels` takes all of the model, for requests without an
            adapter; true demands it of all, on a CPU, at what it costs; false never looks.
        max_weight_tensors: Tensors that one message of a weight update, one folder, or all parts of
            an update may have. 0 takes ten times what the model has, each expert counted, and
            10,000.
        max_weight_bytes: How large they may be together. 0 takes what the model has in float64, and
            1 GiB.
        reference_model_path: A second model, as `model_path`, that no update changes and that gives
            every finished sample its `ref_logprobs`; "" for none. It has memory of its own, for its
            weights and the KV of one sequence of `max_model_len`.
        adapters: LoRA adapters to be loaded at the start: by the id under which requests name each,
            its folder, as PEFT writes them.
        max_adapters: How many adapters may be loaded at the same time.
        max_adapter_rank: The largest rank that one may have.
        model_id: What requests call the model; "" for the last part of its path, without .gguf.
        model_aliases: Other names for it.
        role: What the model may be asked for: to "generate" (and score), to "embed", or "all" that
            it can.
        pooling: How embeddings are pooled where neither the request nor the model's folder says
            it: "mean", "last" or "cls". "" takes the last token where tokens see only those before
            them, and else the mean.
        speculation: "auto" verifies drafted tokens beside the one that each row computes, where
            that is worth while; "off" never does. Neither changes a token or a logprob
            (with `kernels` off: unless `deterministic` is true, a logprob in its last digits).
        draft_sources: Where drafts come from, as `DraftSourceName` says.
        max_draft_tokens: Most drafted tokens of a sample in one step.
        suffix_index_tokens: How many tokens of earlier outputs "suffix" remembers.
        draft_model_path: A smaller model of the same vocabulary, as `model_path`, which drafts
            too; "" for none. Its weights and KV take memory of their own.
    """

    SECTION: ClassVar[str] = "engine"

    model_path: str = BUNDLED_MODEL
    cache_type: Literal["paged", "radix"] = "radix"
    block_size: int = 16
    max_batch_size: int = 0
    max_model_len: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int = 1 << 28
    max_tokens_per_batch: int = 2048
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    cpu_threads: int = 0
    kernels: Literal["auto", "off"] = "auto"
    attention: Literal["auto", "paged", "gather", "tiled"] = "auto"
    attention_tile: int = 0
    cuda_graphs: Literal["auto", "off"] = "auto"
    huge_pages: Literal["auto", "off"] = "auto"
    seed: int = 0
    logprobs_mode: Literal["processed", "raw"] = "processed"
    deterministic: bool | Literal["auto"] = "auto"
    max_weight_tensors: int = 0
    max_weight_bytes: int = 0
    reference_model_path: str = ""
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    max_adapters: int = 32
    max_adapter_rank: int = 256
    model_id: str = ""
    model_aliases: tuple[str, ...] = ()
    role: Literal["all", "generate", "embed"] = "all"
    pooling: PoolingKind | Literal[""] = ""
    speculation: Literal["auto", "off"] = "off"
    draft_sources: tuple[DraftSourceName, ...] = ("prediction", "grammar", "suffix", "ngram")
    max_draft_tokens: int = 16
    suffix_index_tokens: int = 1_000_000
    draft_model_path: str = ""

    def check(self) -> None:
        self.require("model_path", bool(self.model_path), "a folder, or 'tiny'")
        for name in ("block_size", "max_tokens_per_batch", "kv_cache_bytes"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_batch_size", "cpu_threads", "max_weight_tensors", "max_weight_bytes"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("max_adapters", "max_adapter_rank", "max_draft_tokens", "suffix_index_tokens"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("adapters", all(map(is_adapter_id, self.adapters)), ADAPTER_ID_RULE)
        self.require(
            "adapters",
            len(self.adapters) <= self.max_adapters,
            f"at most max_adapters ({self.max_adapters})",
        )
        strict = self.deterministic is True
        own = ("auto", "paged", "tiled" if strict else "gather")
        mode = "with" if strict else "without"
        self.require("attention", self.attention in own, f"{', '.join(own)} {mode} deterministic")
        tile = self.attention_tile
        is_tile = tile == 0 or (16 <= tile <= 1024 and tile.bit_count() == 1)
        self.require("attention_tile", is_tile, "0, or a power of two from 16 to 1024")
        self.require("max_model_len", self.max_model_len >= 2, "at least 2")
        self.require(
            "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "above 0, at most 1"
        )
        self.require(
            "max_tokens_per_batch",
            self.max_tokens_per_batch >= self.max_batch_size,
            f"at least max_batch_size ({self.max_batch_size}), or a full batch could not decode",
        )

    def batch_size_on(self, device_type: str) -> int:
        """`max_batch_size`, with its default worked out for a device ("cpu", "cuda")."""
        default = 128 if device_type == "cpu" else 256
        return self.max_batch_size or min(default, self.max_tokens_per_batch)

    @property
    def model_folder(self) -> Path:
        """The model's folder on disk, or GGUF file, with "tiny" resolved to the bundled one."""
        if self.model_path == BUNDLED_MODEL:
            return Path(__file__).parent.parent / "models" / BUNDLED_MODEL
        try:
            return Path(self.model_path).expanduser()
        except RuntimeError:  # of a user that there is not; whoever reads it finds no such folder
            return Path(self.model_path)

    @property
    def model_name(self) -> str:
        """What requests give in `model`, unless they give an alias."""
        return self.model_id or self.model_folder.name.removesuffix(".gguf")
