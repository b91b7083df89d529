"""What all draft heads have in common.

A head's position p takes the target's hidden state there and the token at p + 1, and gives logits
of the token at p + 2. Its own output takes the place of the target's state further on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from .....config import EngineConfig, ModelError, WeightsError
from ..checkpoint import is_coded, tensors_missing
from ..loaded_model import LoadedModel
from ..model import wrap_model
from ..state.kinds import StateTensor
from ..weights.checks import is_finite
from ..weights.conversion import as_parameters


class HiddenStates(msgspec.Struct, frozen=True):
    """The target's hidden state of each token, which a head keeps beside its keys and values.

    Attributes:
        width: Numbers of a token.
        dtype: Dtype of the numbers.
    """

    width: int
    dtype: torch.dtype

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the state, whose dtype is not the KV cache's."""
        return (StateTensor((self.width,), self.dtype, True),)


class DraftHead(nn.Module):
    """Base of heads, beside a causal language model of Transformers.

    The forward call takes `states`, `[1, tokens, hidden]`, beside `input_ids`.

    Attributes:
        reads: The target's states that it reads: after so many layers each; () for the last ones,
            normalised.
        in_model: Whether its checkpoint is the model's, whose updates have its tensors.
    """

    reads: tuple[int, ...] = ()
    in_model: ClassVar[bool] = False

    def owns(self, name: str) -> bool:
        """Return whether the name in a checkpoint begins as those of the head."""
        return bool(self.rename(name))

    def fold(self, states: Sequence[Tensor]) -> Tensor:
        """Return one state of each token, `[tokens, hidden]`, from those of `reads`."""
        return states[0]

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, from those of the head."""
        return logits

    def rotary_of(self, target: LoadedModel) -> nn.Module:
        """Return the module of rotary factors."""
        raise NotImplementedError

    def rename(self, name: str) -> str:
        """Return a checkpoint's name of a tensor as of this module's checkpoint; "" for a tensor
        that is not the head's own."""
        raise NotImplementedError


def read_tensors(files: Mapping[str, Path], head: DraftHead) -> dict[str, Tensor]:
    """Return the head's tensors of a checkpoint, by their names there.

    Raises:
        ModelError: Some are codes.
    """
    names = [name for name in files if head.rename(name)]
    if coded := [name for name in names if is_coded(name)]:
        raise ModelError(
            f"the draft head's weights are codes, such as {coded[0]}, which a head can't have; set "
            "draft_model_path to a head with plain weights, or to ''"
        )
    tensors: dict[str, Tensor] = {}
    for path in {files[name] for name in names}:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names if files[name] == path}
    return tensors


def as_own(head: Any, tensors: Mapping[str, Tensor], where: object) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as the head's parameters, in its dtypes.

    Raises:
        ModelError: They don't fit, or are not finite.
    """
    renamed = {own: each for name, each in tensors.items() if (own := head.rename(name))}
    # Buffers that are integers need no rules.
    rest = {name: each for name, each in renamed.items() if not each.is_floating_point()}
    floats = {name: each for name, each in renamed.items() if name not in rest}
    try:
        converted = {**as_parameters(head, floats, checkpoint=True), **rest}
    except WeightsError as error:
        why = error.message.removeprefix("the new weights don't fit: ").partition(";")[0]
        raise _misfit(where, why) from error
    own = head.state_dict()
    found: dict[str, Tensor] = {}
    for name, each in converted.items():
        if name not in own:
            raise _misfit(where, f"{name} is not known here")
        if each.shape != own[name].shape:
            shapes = f"{list(each.shape)}, and the head's is {list(own[name].shape)}"
            raise _misfit(where, f"{name} is {shapes}")
        found[name] = each.to(own[name].dtype)
        if not is_finite(found[name]):
            raise _misfit(where, f"{name} has NaN or infinity")
    return found


def _misfit(where: object, why: str) -> ModelError:
    return ModelError(
        f"the draft head in {where} can't be used: {why}; it must be one that was trained for the "
        "model"
    )


def finish_head(
    head: Any, tensors: Mapping[str, Tensor], config: EngineConfig, target: LoadedModel, where: Path
) -> LoadedModel:
    """Fill a head that is on the meta device, share the target's tensors that it lacks, and wrap
    it.

    Args:
        head: The head.
        tensors: By the checkpoint's names.
        config: The settings.
        target: The target.
        where: The checkpoint, for errors.

    Raises:
        ModelError: Tensors are missing or don't fit, or the head can't run.
    """
    found = as_own(head, tensors, where)
    module: Any = target.module
    pairs = (
        (head.get_input_embeddings, module.get_input_embeddings, head.set_input_embeddings),
        (head.get_output_embeddings, module.get_output_embeddings, head.set_output_embeddings),
    )
    names = {id(each): name for name, each in head.named_modules()}
    for own, shared, put in pairs:
        if f"{names[id(own())]}.weight" not in found:
            put(shared())
    head.base_model.rotary_emb = head.rotary_of(target)
    head.load_state_dict(found, strict=False, assign=True)
    if missing := sorted(name for name, each in head.state_dict().items() if each.is_meta):
        raise tensors_missing(where, missing)
    head = head.to(target.device).requires_grad_(False)
    try:
        model = wrap_model(head, target.max_model_len, latent_attention=config.latent_attention)
    except ModelError as error:
        raise ModelError(f"the draft head in {where}: {error.message}") from error
    width = head.config.get_text_config().hidden_size
    return replace(
        model,
        mixers=None,
        other_states=(HiddenStates(width, model.dtypes.activations),),
        is_shared=target.is_shared,
    )
