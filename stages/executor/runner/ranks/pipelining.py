"""Pipeline parallelism: stages of consecutive layers, and what their ranks send each other.

A rank of a stage sends the hidden states of a step to the same tensor rank of the next stage. The
last stage sends the output to rank 0, over a group of these two: rank 0 receives it in another
thread than the one that sends the hidden states of later steps, so that neither waits for the
other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .....config import ModelError
from ..batch import StepOutput
from .group import RankGroup
from .passing import PassingLayer

_CHECKED_TOKENS = 3


class _AwaitedOutput(StepOutput):
    """An output that the last stage still computes."""

    def __init__(self, logits: Tensor, states: Tensor | None, outputs: _Outputs) -> None:
        super().__init__(logits, states)
        self.has_arrived = False
        self._outputs = outputs

    def wait(self) -> None:
        """Wait for the step, from any thread.

        Raises:
            RankError: A rank has failed.
        """
        self._outputs.receive(self)


class _Outputs:
    """Outputs on their way to rank 0, oldest first. An unread one doesn't hold up later ones."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._awaited: deque[_AwaitedOutput] = deque()

    def expect(self, logits: Tensor, states: Tensor | None) -> StepOutput:
        output = _AwaitedOutput(logits, states, self)
        self._awaited.append(output)
        return output

    def receive(self, output: _AwaitedOutput) -> None:
        with self._lock:
            while not output.has_arrived:
                oldest = self._awaited[0]
                self._group.receive(oldest.logits, 1)
                if oldest.states is not None:
                    self._group.receive(oldest.states, 1)
                oldest.has_arrived = True
                self._awaited.popleft()


class PipelineRank:
    """A rank's place in a pipeline of stages.

    Attributes:
        stage: Its stage, from 0.
        num_stages: Stages.
        is_first: Whether the stage has the input embedding.
        is_last: Whether it has the final norm and the output layer.
        layers: The model's layers that it has; set by `take_layers`.
        sizes: The number of layers of each stage; likewise.
        dtype: Dtype of hidden states; likewise.
    """

    def __init__(
        self, group: RankGroup, tensor_parallel: int, outputs: RankGroup | None = None
    ) -> None:
        """
        Args:
            group: All ranks. Those of a stage are neighbours.
            tensor_parallel: Ranks of a stage.
            outputs: Rank 0, and the first rank of the last stage; None on other ranks.
        """
        self.num_stages = group.size // tensor_parallel
        self.stage = group.rank // tensor_parallel
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        self.layers = range(0)
        self.sizes: tuple[int, ...] = ()
        self._group, self._tensor_parallel = group, tensor_parallel
        self._output_group = outputs
        self._outputs = _Outputs(outputs) if outputs is not None and group.rank == 0 else None
        self._width, self._vocab_size = 0, 0
        self.dtype = torch.float32

    def take_layers(self, whole: Any) -> None:
        """Choose the layers.

        Raises:
            ModelError: There are not enough, or the model is not made of layers.
        """
        name, base = type(whole).__name__, whole.base_model
        config = whole.config.get_text_config()
        layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
        count: int = config.num_hidden_layers
        if norm is None or not isinstance(layers, nn.ModuleList) or len(layers) != count:
            _refuse(name, "it is not an embedding, layers and a norm, one after the other")
        if count < self.num_stages:
            _refuse(name, f"it has {count} layers", f"at most {count}")
        split = split_layers(count, self.num_stages)
        self.layers, self.sizes = split[self.stage], tuple(map(len, split))
        self._vocab_size = whole.get_output_embeddings().weight.shape[0]
        self.dtype = whole.get_input_embeddings().weight.dtype
        self._width = config.hidden_size

    def remove_others(self, module: Any) -> frozenset[str]:
        """Take the modules of other stages out of a model; return the names of these modules."""
        base = module.base_model
        names = {id(child): name for name, child in module.named_modules()}
        absent = [layer for index, layer in enumerate(base.layers) if index not in self.layers]
        found = {names[id(layer)] for layer in absent}
        for index, layer in enumerate(base.layers):
            if index not in self.layers:
                base.layers[index] = PassingLayer(layer)
        if not self.is_last:
            found |= {names[id(base.norm)], names[id(module.get_output_embeddings())]}
            base.norm = nn.Identity()
            module.set_output_embeddings(nn.Identity())
        if not self.is_first:
            found.add(names[id(module.get_input_embeddings())])
            module.set_input_embeddings(nn.Identity())
        return frozenset(found)

    def run(
        self, module: Any, input_ids: Tensor, hidden: Tensor | None, call: Mapping[str, Any]
    ) -> Any:
        """Call this stage's part of a model.

        Args:
            module: The causal language model.
            input_ids: `[1, tokens]`, for the first stage.
            hidden: `[1, tokens, hidden]`, for the others.
            call: Further arguments.
        """
        source = {"input_ids": input_ids} if self.is_first else {"inputs_embeds": hidden}
        stage = module if self.is_last else module.base_model
        if not self.is_last:
            call = {name: value for name, value in call.items() if name != "logits_to_keep"}
        return stage(**source, **call)

    def empty_states(self, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Return memory for hidden states, `[tokens, hidden]`."""
        return torch.empty(num_tokens, self._width, dtype=self.dtype, device=device)

    def receive(self, num_tokens: int) -> Tensor | None:
        """Return the hidden states of the stage before, `[1, tokens, hidden]`; None for the first.

        Raises:
            RankError: A rank has failed.
        """
        if self.is_first:
            return None
        hidden = self.empty_states(num_tokens)
        self._group.receive(hidden, self._group.rank - self._tensor_parallel)
        return hidden[None]

    def send(self, hidden: Tensor) -> None:
        """Send hidden states, `[tokens, hidden]`, to the next stage.

        Raises:
            RankError: A rank has failed.
        """
        self._group.send(hidden, self._group.rank + self._tensor_parallel)

    def deliver(self, num_tokens: int, logits: Tensor, states: Tensor | None) -> StepOutput:
        """Send a step's output from the last stage to rank 0, and return it, there to be awaited.

        Args:
            num_tokens: Number of the step's tokens.
            logits: `[samples, vocab]` of the last stage; of others any `[samples, ...]`.
            states: `[tokens, hidden]` of the last stage; on rank 0 any tensor, if states are
                wanted; else None.
        """
        if self._outputs is not None:
            return self._outputs.expect(
                torch.empty(logits.shape[0], self._vocab_size),
                None if states is None else self.empty_states(num_tokens),
            )
        if self._output_group is not None:
            self._output_group.send(logits, 0)
            if states is not None:
                self._output_group.send(states, 0)
        return StepOutput(logits, states)

    def check_states(self, module: nn.Module, hidden: Tensor) -> None:
        """Raises ModelError if layers pass on another kind of hidden states than is sent."""
        wanted = self.empty_states(hidden.shape[1])
        if (hidden.shape[1:], hidden.dtype) != (wanted.shape, wanted.dtype):
            _refuse(type(module).__name__, f"its layers pass on hidden states in {hidden.dtype}")

    @torch.no_grad()
    def check_model(self, module: Any) -> None:
        """Check that a layer needs nothing of earlier ones but their hidden states.

        All ranks of the first stage call it, with loaded weights. It runs the model without its
        layers.

        Raises:
            ModelError: Some layer does.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (1, _CHECKED_TOKENS, self._width)
        positions = torch.arange(_CHECKED_TOKENS)[None]
        call = {"attention_mask": positions.new_empty(1, 1, 1, 1), "use_cache": False}
        name, others = type(module).__name__, []
        for turn in range(3):
            states = torch.randn(shape, generator=generator).to(self.dtype)
            inputs = {"inputs_embeds": states} if turn else {"input_ids": positions}
            with _recording(module.base_model) as layers:
                output = module.base_model(**inputs, position_ids=positions, **call)
            others.append([layer.others for layer in layers])
            if turn and any(
                not torch.equal(states, each)
                for each in (*(layer.hidden for layer in layers), output.last_hidden_state)
            ):
                _refuse(name, "it changes hidden states outside its layers")
        if not all(_same(others[0], each) for each in others[1:]):
            _refuse(name, "its layers take more of its input than the layer before passes on")


class _Recording(PassingLayer):
    """Records the tensors of its call.

    Attributes:
        hidden: The hidden states.
        others: All other tensors.
    """

    hidden: Tensor
    others: list[Tensor]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden = hidden_states
        self.others = list(_tensors_in((args, kwargs)))
        return hidden_states


@contextmanager
def _recording(base: Any) -> Iterator[list[_Recording]]:
    """Replace layers and norm of a model for a while."""
    layers, norm = base.layers, base.norm
    found = [_Recording(layer) for layer in layers]
    base.layers, base.norm = nn.ModuleList(found), nn.Identity()
    try:
        yield found
    finally:
        base.layers, base.norm = layers, norm


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _same(left: list[list[Tensor]], right: list[list[Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(left, right, strict=True)
    )


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage. Where they can't be even, the first stages have one more:
    the last one computes the logits besides."""
    size, more = divmod(num_layers, num_stages)
    ends = [size * stage + min(stage, more) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def _refuse(name: str, why: str, value: str = "1") -> NoReturn:
    raise ModelError(
        f"{name} can't run as several stages: {why}; set engine.pipeline_parallel to {value}"
    )
