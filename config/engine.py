"""Settings of the engine."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from .base import TINY, NonNegativeInt, PositiveInt, Range, Seconds, Section
from .errors import ConfigError
from .quoting import shown

MOST_RANKS = 64
"""Ranks of one model: those that one piece of shared memory has room for."""

PoolingKind = Literal["mean", "last", "cls"]
"""Tokens that a prompt's embedding is made of: all, the last, or the first."""

DraftSourceName = Literal["prediction", "grammar", "suffix", "ngram"]
"""Sources of drafted tokens: the client's expected output, tokens forced by a grammar, earlier
outputs that continued the same tokens, the sample's own earlier tokens.
"""

SchemaKeyword = Literal[
    "not",
    "if",
    "then",
    "else",
    "oneOf",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
]
"""Keywords of JSON schemas that constraints enforce in part or not at all."""

BUNDLED_MODEL = "tiny"
"""The `model_path` of the model bundled with the package."""

BUNDLED_VISION_MODEL = "tiny-vision"
"""The `model_path` of the bundled model that takes images."""

BUNDLED_MODELS = (BUNDLED_MODEL, BUNDLED_VISION_MODEL)


DEFAULT_BATCH_SIZE, _CPU_BATCH_SIZE = 256, 128
"""Default of `max_batch_size`, and what a CPU has in place of it."""


ADAPTER_ID_RULE = "ids of 1 to 128 letters, digits and . _ : / @ + -, the first a letter or digit"

_ADAPTER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def is_adapter_id(id: str) -> bool:
    """Return whether an adapter may have this id: `ADAPTER_ID_RULE`."""
    return _ADAPTER_ID.fullmatch(id) is not None


# A hub name, by the hub library's rule.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def missing_model(path: object) -> str:
    """Return the end of a sentence about a missing model path.

    Nothing is downloaded for a path, so a name on the hub needs `pull` first.
    """
    if _HUB_NAME.fullmatch(str(path)):
        return f"fetch it with `nano-inference pull {path}`, which prints the folder to give"
    return (
        f"give a folder in Transformers' format, a GGUF file, or {BUNDLED_MODEL!r} or "
        f"{BUNDLED_VISION_MODEL!r} for a bundled model"
    )


class EngineConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The model, its KV cache, and batch sizes of one lane.

    Attributes:
        model_path: A folder in Transformers' format, a GGUF file, or "tiny" for the bundled model;
            "tiny-vision" for the one that takes images.
        cache_type: Prefix cache. "radix": a token tree that finds the longest match with any
            computed sequence; "paged": full blocks found by block-hash chain.
        block_size: Tokens per KV block.
        max_batch_size: Sequences that run concurrently. The default is at most
            `max_tokens_per_batch`, and 128 on a CPU, where each sequence makes the step longer; any
            other number holds on every device. `InferenceEngine.config` has the effective number.
        max_model_len: Limit of prompt and completion together, in tokens; the model's own limit
            applies too.
        gpu_memory_utilization: Share of the device's memory for weights and KV cache (CUDA, XPU).
        kv_cache_bytes: Size of the KV cache on CPU and MPS; memory is taken as blocks are first
            used.
        kv_host_bytes: Host memory for KV blocks that the cache evicts, from which they are loaded
            again; 0 for none, or as much as reading from `kv_disk_path` needs.
        kv_disk_path: Folder for evicted KV blocks, one subfolder per executor, which later starts
            with the same weights read again; "" for none.
        kv_disk_bytes: Size limit of that folder.
        kv_eviction: Order in which blocks leave a full tier: "lru", "clock" (second chance), or
            "s3fifo", which keeps blocks that are used once from displacing others.
        kv_audit_every: On average, one in so many blocks loaded from a tier is computed again
            while nothing else runs, and compared bit for bit; a difference turns the tiers off
            until the cache is flushed. 0 is off. Without deterministic mode there is no audit.
        kv_events: Publish which KV blocks the cache stores and removes, on a stream of the bus for
            routers outside (docs/kv-events.md).
        kv_listen: host:port at which executors of other hosts read the KV of sequences that this
            one hands over (`pipeline.roles`); port 0 for any. "" for this host only.
        kv_secret: The shared secret of both sides of such a connection.
        state_snapshots_bytes: Memory for snapshots of the recurrent state that models with such
            layers keep beside K and V, from which cached prefixes go on
            (docs/recurrent-state.md); 0 for none, so that no prefix is found again. On CPU and MPS
            it is beside `kv_cache_bytes`.
        state_snapshot_blocks: Snapshots of long prompts: one after each so many blocks, beside
            those at branches and ends; 0 for none.
        response_cache_bytes: Memory for finished responses, which are served again to equal
            requests where deterministic mode makes them a function of the request; 0 is off
            (docs/response-cache.md).
        kv_session_share: Largest share of the KV cache's blocks that clients may pin between the
            turns of conversations (docs/kv-sessions.md); 0 for none.
        kv_session_ttl_s: Longest time to live of a session, in seconds.
        max_tokens_per_batch: Token budget of one step; longer prefills are chunked.
        max_image_tokens_per_step: Image tokens that one step encodes; a larger image is refused.
        image_cache_bytes: Memory on the device for embeddings of images, which requests about the
            same image share.
        dtype: Of plain weights and of activations. "auto" is the checkpoint's own, and bfloat16
            for a GGUF file of quantised weights, which stay as they are.
        quantization: Codes of the weights of linear layers and experts (docs/quantization.md).
            "auto": as the checkpoint has them; "int8" or "int4": made at load, from weights that
            are rounded to `dtype` first.
        quantization_group: Inputs that share a scale: 32, 64 or 128; 0 is one scale per output with
            "int8", and 128 with "int4".
        quantization_zero_points: Whether codes made at load have a zero point per group; without,
            they are symmetric.
        quantization_ignore: Layers that are not quantised at load: names of modules, or patterns
            such as "*.down_proj". Routers never are. Output layers get "int8" with "int4", unless
            a pattern names them.
        activation_bits: Fixed-point bits of the activations of quantised layers on a CPU: 16, which
            is finer than bfloat16, or 8, which is faster for many rows and changes results.
        kv_dtype: Dtype of the KV cache. "auto": that of the activations; "int8" or "fp8": half the
            memory, with a scale per token and head, which changes results (docs/quantization.md).
        device: "auto" is CUDA if there is one, else XPU, else MPS, else the CPU. Otherwise a torch
            device such as "cuda:1"; AMD's are "cuda" too (docs/cuda.md).
        cpu_threads: Threads of a step on CPU, for the whole process. 0 is one in the executor's
            stage for a small model, whose steps are too short to share, and torch's default
            otherwise: one per core.
        kernels: "auto" uses the bfloat16 and float32 kernels on CPU, compiled at the first start
            where possible; "off" runs Transformers' modules unchanged. On CUDA, Triton's.
        attention: Attention back end. "paged" reads the KV cache in place without materialising a
            row's scores (flash attention): the package's kernel on CPU (bfloat16, float32), Triton
            on CUDA; "gather" gathers keys and values for PyTorch; "tiled" is deterministic mode's
            without "paged". "auto" is the fastest available.
        attention_tile: Positions per tile of "paged" on CUDA, a power of two from 16 to 1024; 0
            chooses by head size. Refused by back ends without tiles.
        latent_attention: For models with multi-head latent attention (DeepSeek, GLM-4.7-Flash,
            MiniCPM3 and others): "on", or "auto" on a CPU, keeps each token's latent in the KV
            cache, a tenth of the bytes or less; "off" keeps the keys and values of all heads, so
            that long prompts are computed faster (docs/latent-attention.md).
        cuda_graphs: "auto" records decode steps as CUDA graphs at load and replays them (CUDA, with
            `kernels`); "off" launches each operation.
        huge_pages: "auto" puts weights and KV cache into huge pages if available (CPU, Linux),
            which one core reads faster; "off" leaves weights where they were loaded, possibly in
            the mapped file.
        seed: Seed of requests without one.
        logprobs_mode: "processed": logprobs of the policy that tokens are sampled from, after
            penalties, bias and temperature; "raw": of the model's output (docs/sampling.md).
        max_sampling_mask: Most token ids in the sampling mask of a position. The mask of a larger
            support is empty; its `support_logprobs` is exact all the same (docs/sampling.md).
        return_routed_experts: Return the routed experts of each request, as if it had
            `return_routed_experts`: likewise for clients of vLLM. Prompts are then computed whole.
        deterministic: Tokens and logprobs are bitwise equal in any batch, and however prompts
            are chunked, cached or recomputed. "auto": where it costs nothing (on a CPU where
            `kernels` covers the whole model, for requests without an adapter); true: always, on a
            CPU, at its cost; false: off.
        max_weight_tensors: Limit on the tensors of one weight update, its parts together, or of one
            folder. 0 is ten times the model's tensors, each expert counted, plus 10,000.
        max_weight_bytes: Limit on their bytes together. 0 is the model's size in float64, plus 1
            GiB.
        weight_log: Folder of the log of weights, which has every version, so that restarted
            executors catch up and past tokens can be computed again (docs/weights.md); "" for none.
        weight_log_snapshot_every: Deltas between two snapshots of the log.
        weight_log_max_versions: The most versions in the log; the oldest ones are dropped. The
            newest snapshot and its deltas stay in any case.
        weight_log_max_bytes: The most bytes of the log, likewise.
        reference_model_path: A second model, as `model_path`, that is never updated and computes
            `ref_logprobs` of every finished sample; "" for none. It takes memory for its weights
            and the KV of one sequence of `max_model_len`. "unquantized": the model's own weights
            before they became codes, beside these; updates replace both (docs/quantization.md).
        adapters: LoRA adapters loaded at the start: folder in PEFT's format by id
            (docs/adapters.md).
        max_adapters: Limit on loaded adapters.
        max_adapter_rank: Limit on an adapter's rank.
        model_id: The model's name in requests; "" is the last part of its path, without .gguf.
        model_aliases: Other names of the model.
        role: Allowed uses: "generate" (and score), "embed", or "all" that the model can do.
        pooling: Pooling of embeddings where neither the request nor the model's folder specifies
            one: "mean", "last" or "cls". "" is the last token for causal attention, else the mean
            (docs/embeddings.md).
        ignored_schema_keywords: Keywords of JSON schemas that constraints ignore, of those that
            they enforce in part or not at all (docs/constraints.md); `oneOf` is then `anyOf`. A
            schema with one that isn't named here is refused.
        speculation: "auto" verifies drafted tokens beside the one computed per row, where that
            pays; "off" never does. Tokens and logprobs are the same (with `kernels` off and
            `deterministic` not true: logprobs up to their last digits); docs/speculation.md.
        draft_sources: Sources of drafted tokens, as `DraftSourceName` lists.
        max_draft_tokens: Limit on drafted tokens of a sample per step.
        suffix_index_tokens: Tokens of earlier outputs that "suffix" keeps.
        draft_model_path: A smaller model of the same vocabulary, as `model_path`, that drafts too,
            or an EAGLE-3 head; "mtp" for the MTP head of the model's own checkpoint, "" for none.
            Its weights and KV take memory of their own.
        tensor_parallel: Ranks (processes) that share each layer of the model. They must divide its
            KV heads.
        pipeline_parallel: Stages of consecutive layers, each computed by `tensor_parallel` ranks of
            its own, which work on different parts of the batch at a time (docs/ranks.md).
        expert_parallel: 1, or `tensor_parallel`: then each rank has some of the routed experts as a
            whole, in place of a part of each.
        rank_invariant: The same bits for 1, 2 and 4 ranks, at the cost of smaller products
            (docs/determinism.md). Needs `deterministic: true`.
        rank_timeout_s: Longest wait of a rank for another one. Then all are started again, and
            their requests go on.
    """

    SECTION: ClassVar[str] = "engine"
    SECRETS: ClassVar[frozenset[str]] = frozenset(("kv_secret",))

    model_path: str = BUNDLED_MODEL
    cache_type: Literal["paged", "radix"] = "radix"
    block_size: PositiveInt = 16
    max_batch_size: PositiveInt = DEFAULT_BATCH_SIZE
    max_model_len: Annotated[int, Range("at least 2", 2)] = 8192
    gpu_memory_utilization: Annotated[float, Range("above 0, at most 1", TINY, 1)] = 0.9
    kv_cache_bytes: PositiveInt = 1 << 28
    kv_host_bytes: NonNegativeInt = 0
    kv_disk_path: str = ""
    kv_disk_bytes: PositiveInt = 16 << 30
    kv_eviction: Literal["lru", "clock", "s3fifo"] = "lru"
    kv_audit_every: NonNegativeInt = 1000
    kv_events: bool = False
    kv_listen: str = ""
    kv_secret: str = ""
    state_snapshots_bytes: NonNegativeInt = 1 << 30
    state_snapshot_blocks: NonNegativeInt = 128
    response_cache_bytes: NonNegativeInt = 0
    kv_session_share: Annotated[float, Range("from 0 to 1", 0, 1)] = 0.5
    kv_session_ttl_s: Seconds = 3600.0
    max_tokens_per_batch: PositiveInt = 2048
    max_image_tokens_per_step: PositiveInt = 8192
    image_cache_bytes: PositiveInt = 1 << 28
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "int8", "int4"] = "auto"
    quantization_group: Literal[0, 32, 64, 128] = 0
    quantization_zero_points: bool = False
    quantization_ignore: tuple[str, ...] = ()
    activation_bits: Literal[16, 8] = 16
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    device: str = "auto"
    cpu_threads: NonNegativeInt = 0
    kernels: Literal["auto", "off"] = "auto"
    attention: Literal["auto", "paged", "gather", "tiled"] = "auto"
    attention_tile: int = 0
    latent_attention: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: Literal["auto", "off"] = "auto"
    huge_pages: Literal["auto", "off"] = "auto"
    seed: int = 0
    logprobs_mode: Literal["processed", "raw"] = "processed"
    max_sampling_mask: PositiveInt = 4096
    return_routed_experts: bool = False
    deterministic: bool | Literal["auto"] = "auto"
    max_weight_tensors: NonNegativeInt = 0
    max_weight_bytes: NonNegativeInt = 0
    weight_log: str = ""
    weight_log_snapshot_every: PositiveInt = 16
    weight_log_max_versions: PositiveInt = 1000
    weight_log_max_bytes: PositiveInt = 64 << 30
    reference_model_path: str = ""
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    max_adapters: PositiveInt = 32
    max_adapter_rank: PositiveInt = 256
    model_id: str = ""
    model_aliases: tuple[str, ...] = ()
    role: Literal["all", "generate", "embed"] = "all"
    pooling: PoolingKind | Literal[""] = ""
    ignored_schema_keywords: tuple[SchemaKeyword, ...] = ()
    speculation: Literal["auto", "off"] = "off"
    draft_sources: tuple[DraftSourceName, ...] = ("prediction", "grammar", "suffix", "ngram")
    max_draft_tokens: PositiveInt = 16
    suffix_index_tokens: PositiveInt = 1_000_000
    draft_model_path: str = ""
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    rank_invariant: bool = False
    rank_timeout_s: Seconds = 30.0

    def check(self) -> None:
        self.require("model_path", bool(self.model_path), "a folder, or 'tiny'")
        self.require(
            "reference_model_path",
            not self.keeps_unquantized or (self.quantization != "auto" and self.num_ranks == 1),
            'a folder, or "unquantized" with quantization int8 or int4, on one rank',
        )
        self.require("adapters", all(map(is_adapter_id, self.adapters)), ADAPTER_ID_RULE)
        self.require(
            "adapters",
            len(self.adapters) <= self.max_adapters,
            f"at most max_adapters ({self.max_adapters})",
        )
        self.require(
            "response_cache_bytes",
            self.response_cache_bytes == 0 or self.deterministic is not False,
            "0 with deterministic: false, since without that mode a response depends on the batch",
        )
        strict = self.deterministic is True
        own = ("auto", "paged", "tiled" if strict else "gather")
        mode = "with" if strict else "without"
        self.require("attention", self.attention in own, f"{', '.join(own)} {mode} deterministic")
        plain = self.quantization == "auto"
        for name in ("quantization_group", "quantization_zero_points", "quantization_ignore"):
            self.require(
                name,
                not (plain and getattr(self, name)),
                "left out with quantization 'auto': it is for codes that are made at load",
            )
        tile = self.attention_tile
        is_tile = tile == 0 or (16 <= tile <= 1024 and tile.bit_count() == 1)
        self.require("attention_tile", is_tile, "0, or a power of two from 16 to 1024")
        self.require(
            "expert_parallel",
            self.expert_parallel in (1, self.tensor_parallel),
            f"1, or as tensor_parallel ({self.tensor_parallel})",
        )
        self.require(
            "pipeline_parallel" if self.pipeline_parallel > 1 else "tensor_parallel",
            self.num_ranks <= MOST_RANKS,
            f"such that tensor_parallel times pipeline_parallel is at most {MOST_RANKS}",
        )
        several = (
            f"pipeline_parallel {self.pipeline_parallel}"
            if self.pipeline_parallel > 1
            else f"tensor_parallel {self.tensor_parallel}"
        )
        for name in ("kv_host_bytes", "kv_disk_path"):
            self.require(
                name,
                self.num_ranks == 1 or not getattr(self, name),
                f"left out with {several}, which excludes it",
            )
        self.require(
            "speculation",
            self.pipeline_parallel == 1 or self.speculation == "off",
            f"'off' with pipeline_parallel {self.pipeline_parallel}: a step's drafts depend on the "
            "step before, which is still being computed",
        )
        self.require(
            "rank_invariant",
            not self.rank_invariant or strict,
            "false without deterministic: true, since bits then depend on the batch as well",
        )
        self.require(
            "max_tokens_per_batch",
            self.max_tokens_per_batch >= self.max_batch_size
            or self.max_batch_size == DEFAULT_BATCH_SIZE,
            f"at least max_batch_size ({self.max_batch_size}), or a full batch could not decode",
        )

    @property
    def keeps_unquantized(self) -> bool:
        """Whether the reference model is the model itself, with weights that are no codes."""
        return self.reference_model_path == "unquantized"

    def of_reference(self) -> EngineConfig:
        """Return the settings of the reference model."""
        own = msgspec.structs.replace(self.on_one_rank(), reference_model_path="")
        if not self.keeps_unquantized:
            return msgspec.structs.replace(own, model_path=self.reference_model_path)
        return msgspec.structs.replace(
            own,
            quantization="auto",
            quantization_group=0,
            quantization_zero_points=False,
            quantization_ignore=(),
        )

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.pipeline_parallel * self.tensor_parallel

    def on_one_rank(self) -> EngineConfig:
        """Return these settings for a smaller model beside this one."""
        return msgspec.structs.replace(
            self,
            tensor_parallel=1,
            pipeline_parallel=1,
            expert_parallel=1,
            rank_invariant=False,
        )

    def batch_size_on(self, device_type: str) -> int:
        """Return `max_batch_size`; if it is the default, as it suits a device type ("cpu")."""
        if self.max_batch_size != DEFAULT_BATCH_SIZE:
            return self.max_batch_size
        most = _CPU_BATCH_SIZE if device_type == "cpu" else DEFAULT_BATCH_SIZE
        return min(most, self.max_tokens_per_batch)

    @classmethod
    def of(cls, given: EngineConfig | str | os.PathLike[str] | None) -> EngineConfig:
        """Return settings as they are, those of a model's path, or the defaults.

        Raises:
            ConfigError: `given` is neither.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if isinstance(given, str | os.PathLike):
            return cls(model_path=os.fspath(given))
        hint = "; pass its .engine" if isinstance(getattr(given, "engine", None), cls) else ""
        raise ConfigError(
            f"an engine takes a model's path or an EngineConfig, not {shown(given)}{hint}"
        )

    @property
    def model_folder(self) -> Path:
        """Path of the model's folder or GGUF file; a bundled model's name is resolved."""
        if self.model_path in BUNDLED_MODELS:
            return Path(__file__).parent.parent / "models" / self.model_path
        try:
            return Path(self.model_path).expanduser()
        except RuntimeError:  # an unknown user: the path is left, and loading finds no such folder
            return Path(self.model_path)

    @property
    def model_name(self) -> str:
        """The model's primary name in requests."""
        return self.model_id or _name_of(self.model_path)


@lru_cache(maxsize=64)
def _name_of(model_path: str) -> str:
    """Return the name of a model's folder or GGUF file; requests ask for it several times each."""
    return EngineConfig(model_path=model_path).model_folder.name.removesuffix(".gguf")
