"""Records a function's tensor operations and replays them, on CPU, as CUDA graphs do on CUDA."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import ExecutorCore, LoadedModel
from nano_inference.stages.executor.parts.graphs import Graphs
from nano_inference.stages.executor.runner import interface
from nano_inference.stages.executor.runner.attention.paged import PagedBackend
from nano_inference.stages.executor.runner.attention_options import AttentionOptions
from nano_inference.stages.executor.runner.batch import DecodeRows
from nano_inference.stages.executor.runner.fast_modules import modules
from nano_inference.stages.executor.runner.graphs import Step
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.cpu import LinearKind

_WAITS = ("aten.item", "aten.is_nonzero", "aten._local_scalar_dense", "aten.nonzero", "aten.equal")
"""Operations for which the host waits for the device, so that a graph can't hold them."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_WAITS):
            raise RuntimeError(f"{func} can't be recorded")
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, outputs))
        return outputs


class OperationRecorder:
    """A `Capture`: replaying runs the recorded operations on the recorded tensors, no Python.

    Attributes:
        recorded: How many steps were recorded.
        operations: How many operations the last one has.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.operations = 0

    def __call__(self, step: Step) -> Step:
        with _Recording() as recording:
            outputs = step()
        self.recorded += 1
        self.operations = len(recording.calls)

        @torch.inference_mode()
        def replay() -> tuple[Tensor, ...]:
            for func, args, kwargs, before in recording.calls:
                after = func(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    # Views and in-place results keep their address.
                    if isinstance(old, Tensor) and not _same_memory(old, new):
                        old.copy_(new)
            return outputs

        return replay


def core_as_on_cuda(config: EngineConfig, model: LoadedModel, *, graphs: bool) -> ExecutorCore:
    """A core that runs as on CUDA, with recorded decode steps or without."""
    backend = PagedBackend(model, config.block_size, PlainPagedAttention)
    core = ExecutorCore(config, model=model, backend=backend, runs_ahead=True)
    if graphs:
        core.use(Graphs(core.state, OperationRecorder()))
    return core


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


class PlainPagedAttention:
    """kernels.cpu.PagedAttention in PyTorch: over whole block tables, in fixed shapes."""

    def __init__(self, keys: Tensor, values: Tensor, heads: int, options: AttentionOptions) -> None:
        self._keys, self._values = keys, values
        self._group = heads // keys.shape[2]
        self._scale, self._softcap, self._sinks = options.scale, options.softcap, options.sinks
        self._span = options.span

    def find_tensors(self) -> None:
        pass

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for whole, new in ((self._keys, keys), (self._values, values)):
            whole.view(-1, *whole.shape[2:]).index_copy_(0, slots, new)

    def decode(self, queries: Tensor, rows: DecodeRows) -> Tensor:
        tables, contexts = rows.tables[: rows.count], rows.contexts[: rows.count, None]
        keys, values = (
            cache[tables].flatten(1, 2).repeat_interleave(self._group, dim=2)
            for cache in (self._keys, self._values)
        )
        scores = torch.einsum("rhd,rphd->rhp", queries[: rows.count], keys) * self._scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        positions = torch.arange(keys.shape[1], device=keys.device)
        hidden = (positions >= contexts) | (positions < self._span.first(contexts - 1))
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(wide).masked_fill(hidden[:, None], float("-inf"))
        if self._sinks is not None:
            sinks = self._sinks.to(wide)[None, :, None].expand(rows.count, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[1]].to(values.dtype)
        return torch.einsum("rhp,rphd->rhd", weights, values)


def core_with_kernels(
    monkeypatch: pytest.MonkeyPatch,
    config: EngineConfig,
    model: LoadedModel,
    kernels: Any,
    attention: Any,
) -> ExecutorCore:
    """A core whose model takes these kernels as on CUDA, such as Triton's under its interpreter."""
    backend = PagedBackend(model, config.block_size, attention)
    monkeypatch.setattr(interface, "choose_backend", lambda *_: (backend, ""))
    monkeypatch.setattr(modules, "module_kernels", lambda _device: kernels)
    config = msgspec.structs.replace(config, deterministic=False)
    return ExecutorCore(config, model=model, runs_ahead=True)


class PlainKernels:
    """The kernels for parts of decoder layers in PyTorch."""

    class RMSNorm(cpu.RMSNorm):
        def __call__(self, rows: Tensor) -> Tensor:
            weight = self.weight_for(rows)
            factor = weight + 1 if self.shifted else weight
            return F.rms_norm(rows, rows.shape[-1:], factor, self.epsilon)

    @staticmethod
    def rotate(rows: Tensor, heads: int, cos: Tensor, sin: Tensor, apart: int = 0) -> None:
        width = cos.shape[1]
        x = rows[:, : heads * width].unflatten(1, (heads, width))
        low, high = x.chunk(2, -1)
        x.copy_(x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None])

    @staticmethod
    def gate(gates: Tensor, ups: Tensor, kind: LinearKind) -> Tensor:
        if kind is LinearKind.GATED_SILU:
            return F.silu(gates) * ups
        return F.gelu(gates, approximate="tanh") * ups
