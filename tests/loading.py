"""The bundled model, loaded and checked once per process and not for each engine.

Most of what the start of an engine with it costs is Transformers' loading, and comparisons that
come out the same each time. They are tested in tests/stages/executor/ and by every process.

Nor does each pipeline start processes of its own that decode images, which import Transformers'
image processors: tests/media/ has their start and end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nano_inference.config import EngineConfig
from nano_inference.media.decoder import ImageDecoder
from nano_inference.stages.admission.parts import images
from nano_inference.stages.executor.runner import model as models
from nano_inference.stages.executor.runner.deterministic import Determinism
from nano_inference.stages.executor.runner.fast_modules.modules import FastModules
from nano_inference.text.grammar import GrammarCompiler

BUNDLED = EngineConfig().model_folder
SHORT = "nano-test-model-"
"""The prefix of a folder's name that selects a bundled model with fewer layers."""

Offers = Iterable[tuple[nn.Module, Sequence[Callable[..., Any]]]]

_load_weights = models._load_weights
_check = Determinism.check
_install = FastModules.__init__
_compare = FastModules._compare

_find_vocabulary = GrammarCompiler._find_vocabulary

_chosen: dict[Any, list[int | None]] = {}
_vocabularies: dict[tuple[Path, int], Any] = {}
_deterministic: set[Any] = set()
_decoders: dict[str, ImageDecoder] = {}


def _is_bundled(folder: Path) -> bool:
    return folder == BUNDLED or folder.parent.name.startswith(SHORT)


@cache
def _bundled(folder: Path, dtype: str) -> nn.Module:
    return _load_weights(folder, models.load_config(folder), dtype)


def _weights(folder: Path, hf_config: Any, dtype: str, **options: Any) -> nn.Module:
    if options.get("without_output") or not _is_bundled(folder):
        return _load_weights(folder, hf_config, dtype, **options)
    return copy.deepcopy(_bundled(folder, dtype))


def _kind(model: Any, builder: Any) -> Any:
    """All that comparisons depend on; None if it is not the bundled model as it was loaded."""
    folder = model.hf_config.name_or_path
    if model.is_shared or model.shards is not None or not _is_bundled(Path(folder)):
        return None
    parts = tuple(type(part).__name__ for part in model.module.modules())
    return folder, model.dtypes, model.max_model_len, type(builder._backend), parts


def _installed(self: Any, model: Any, cache: Any, builder: Any, **options: Any) -> None:
    kind, tiles = _kind(model, builder), type(options.get("tiles"))
    self.compared = iter((kind, tiles, number) for number in range(9)) if kind else None
    if options.get("with_gradients"):
        self.compared = None
    _install(self, model, cache, builder, **options)


def _compared(self: Any, candidates: Offers, run: Any, agree: Any) -> dict[nn.Module, Any]:
    if self.compared is None:
        return _compare(self, candidates, run, agree)
    key, offers = next(self.compared), list(candidates)
    if (choice := _chosen.get(key)) is not None:
        return {
            module: each[place]
            for (module, each), place in zip(offers, choice, strict=True)
            if place is not None
        }
    agreed = _compare(self, offers, run, agree)
    places = [(module, list(each)) for module, each in offers]
    _chosen[key] = [
        each.index(agreed[module]) if module in agreed else None for module, each in places
    ]
    return agreed


def _checked(self: Any) -> None:
    kind = _kind(self.model, self.builder)
    if kind is None or kind not in _deterministic:
        _check(self)
        _deterministic.add(kind)


def _vocabulary(self: GrammarCompiler) -> Any:
    """It lives on between two engines, and with it the process that tries grammars."""
    found = _find_vocabulary(self)
    if _is_bundled(self.folder):
        _vocabularies[self.folder, self.vocab_size] = found
    return found


class _SharedDecoder(ImageDecoder):
    def close(self) -> None:
        """Keep the processes for the next pipeline."""


def _decoder(*settings: Any, **source: Any) -> ImageDecoder:
    return _decoders.setdefault(repr((settings, source)), _SharedDecoder(*settings, **source))


@contextmanager
def loaded_once() -> Iterator[None]:
    """Engines that start meanwhile have it of a former one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_load_weights", _weights)
        patch.setattr(FastModules, "__init__", _installed)
        patch.setattr(FastModules, "_compare", _compared)
        patch.setattr(Determinism, "check", _checked)
        patch.setattr(GrammarCompiler, "_find_vocabulary", _vocabulary)
        patch.setattr(images, "ImageDecoder", _decoder)
        yield
