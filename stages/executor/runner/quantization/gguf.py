"""Loading of GGUF files: quantised weights stay in their blocks' precision, as codes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .....config import EngineConfig, ModelError
from .....text.gguf import require_packages
from .....text.gguf_facts import LINK, facts_of
from .....text.gguf_header import read_header
from ..kernels.codes import PlainCodes, put_plain
from ..linear.formats.gguf import KINDS
from ..whole_model import widen
from .gguf_tensors import GgufFile, LazyBlocks, LazyTensor, Target, has_blocks, slab_of, targets_of
from .loading import KEPT, CodedLayer, Plan, StoredCodes, plan_for


def options_of(
    folder: Path, hf_config: PreTrainedConfig, config: EngineConfig, auto: Any, dtype: torch.dtype
) -> tuple[Plan | None, dict[str, Any]]:
    """Return the plan of quantised layers, and arguments for `from_pretrained`.

    Args:
        folder: The folder that a GGUF file was converted to.
        hf_config: Its configuration.
        config: The settings.
        auto: The class of Transformers that loads the model.
        dtype: Dtype of plain weights, and of activations.

    Raises:
        ModelError: The file doesn't hold the model that its header describes, or the settings ask
            for codes of weights that are codes already.
    """
    require_packages()
    with torch.device("meta"):
        whole: Any = auto.from_config(hf_config, dtype=dtype)
    facts = facts_of(folder)
    assert facts is not None
    _check_parameters(facts.file, facts.num_parameters, whole)
    if config.quantization != "auto" and facts.quantized:
        raise ModelError(
            f"engine.quantization {config.quantization}: {facts.file} is quantised already "
            f"({', '.join(facts.quantized)}); set it to 'auto', or choose a file of floats"
        )
    widen(whole, dtype)
    file = GgufFile(folder / LINK, read_header(folder / LINK))
    tensors, targets = file.header.tensors, targets_of(file.header, whole)
    modules = dict(whole.named_modules())
    weights = [name for name in targets if name.endswith(".weight")]
    owners = {name.removesuffix(".weight"): targets[name] for name in weights}
    coded = {
        name: target
        for name, target in owners.items()
        if not KEPT.search(name) and has_blocks(target, file.header, modules.get(name))
    }
    there = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    state: dict[str, Any] = {}
    unpacked: set[str] = set()
    for name, target in targets.items():
        if name.endswith(".weight") and name.removesuffix(".weight") in coded:
            state[name] = LazyBlocks(file, tensors[target.sources[0]])
        elif name in there:
            state[name] = LazyTensor(file, target, there[name].dtype)
            unpacked |= {tensors[source].kind for source in target.sources}
    if facts.quantized:
        plan: Plan | None = _KeptBlocks(file, coded, unpacked & {*facts.quantized})
    else:
        plan = plan_for(config, hf_config)
    options = {"config": hf_config} if plan is None else plan.options(hf_config)
    return plan, {"state_dict": state, **options}


def _check_parameters(file: str, held: int, whole: nn.Module) -> None:
    """Check that a GGUF file has roughly the parameters of the model that its header describes.

    Otherwise missing tensors would be allocated at random before the refusal. If less than half is
    missing, loading names the tensors.
    """
    wanted = sum(parameter.numel() for parameter in whole.parameters())
    if wanted > 2 * held:
        raise ModelError(
            f"{file} describes a model of {wanted} parameters, and its tensors have {held}; copy "
            "or convert it again"
        )


class _KeptBlocks(StoredCodes):
    """The layers of a GGUF file whose blocks are codes here, too."""

    stored = ("weight",)

    def __init__(self, file: GgufFile, targets: Mapping[str, Target], unpacked: set[str]) -> None:
        """Take the plan.

        Args:
            file: The file.
            targets: The weights whose blocks are kept, by the names of modules.
            unpacked: Types of quantised tensors that aren't.
        """
        self._file, self._targets, self._unpacked = file, targets, unpacked
        kinds = {file.header.tensors[each.sources[0]].kind for each in targets.values()}
        self.label = f"GGUF {', '.join(sorted(kinds))}" if kinds else "GGUF, unpacked"

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._unpacked:
            return ()
        kinds = ", ".join(sorted(self._unpacked))
        return (f"tensors in {kinds} are unpacked to plain weights, some or all",)

    def handles(self, name: str) -> bool:
        return name in self._targets

    def read(
        self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> CodedLayer | Tensor:
        target, blocks = self._targets[name], stored["weight"]
        source = self._file.header.tensors[target.sources[0]]
        kind, columns = KINDS[source.kind], source.shape[-1]
        form = kind.form(len(blocks), columns)
        tensors: dict[str, Tensor] = {}
        count = slab_of(columns)
        for start in range(0, len(blocks), count):
            wanted = slice(start, start + count)
            part = blocks[wanted if target.rows is None else target.rows[wanted]]
            plain = kind.plain(part)
            _check_finite(self._file, target.sources[0], plain)
            put_plain(tensors, form, plain, start)
        return CodedLayer(form, tensors, target.inputs)


def _check_finite(file: GgufFile, name: str, plain: PlainCodes) -> None:
    """Check that scales and offsets are finite. Codes always are: each byte is a number."""
    for scales in (plain.scales, plain.offsets):
        if scales is None:
            continue
        numbers = scales.values if scales.factors is None else scales.factors
        if not numbers.isfinite().all():
            raise ValueError(
                f"its scales in {file.path.resolve()}, of {name}, are infinite or not numbers; "
                "copy or convert the file again"
            )
