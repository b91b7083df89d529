"""What a model's folder says beside the weights: tokenizer, chat template, stop ids, sampling.

Shared ground of the stages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder in Transformers' format, with its chat template if it has one.

    Nothing is downloaded and no code from the folder is run.

    Raises:
        ModelError: The folder or its tokenizer is missing or can't be read, or the tokenizer is
            not one of the `tokenizers` library (a "fast" one).
    """
    # Imported here because it takes seconds and brings torch, which most users of this module's
    # importers (clients, tests of the cores) never need.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; set engine.model_path to one")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"{folder} holds no tokenizer.json; save the model's tokenizer there with "
            f"tokenizer.save_pretrained()"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # For a broken tokenizer.json the tokenizers library raises Exception itself.
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the tokenizer in {folder} can't be loaded: {first_line:.300}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or len(tokenizer) == 0:
        raise ModelError(
            f"the tokenizer in {folder} is not backed by a tokenizer.json; convert it to one "
            f"(a fast tokenizer) and save it there"
        )
    return tokenizer


def stop_token_ids_of(folder: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The ids that end a generation by default.

    As in Transformers' `generate`: `eos_token_id` of generation_config.json, else of config.json;
    where neither has one, the tokenizer's own. Empty when the model has none at all.

    Raises:
        ModelError: One of the two files can't be read, or holds an id that is none.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = _read_json(path).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ModelError(f"{path}: eos_token_id is {found!r}; it must be an id or a list")
            return frozenset(ids)
    own = tokenizer.eos_token_id
    return frozenset() if own is None else frozenset((int(own),))


_SAMPLING: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda x: x == 0 or 1e-4 <= x <= 1e4, "0 or from 0.0001 to 10000"),
    "top_k": (int, lambda x: 0 <= x < 2**63, "0 or a number of tokens"),
    "top_p": (float, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "from 0 to 1"),
    "repetition_penalty": (float, lambda x: 1e-4 <= x <= 10, "from 0.0001 to 10"),
}
"""The settings taken from generation_config.json, in the ranges that admission takes."""


def default_sampling_params(folder: Path) -> SamplingParams:
    """How the model's makers advise to sample: what generation_config.json in its folder names.

    temperature, top_k, top_p, min_p and repetition_penalty are taken; what is absent or null stays
    at our own default, which changes nothing. `do_sample: false` is greedy, temperature 0, whatever
    else stands there.

    This is never applied silently. A request is sampled as it says itself: in RL the tokens must
    come from the model's own distribution, or the logprobs that training relies on are of another
    policy; and the same request must not mean something else on another model. Who wants the
    makers' advice asks for it here and passes it on, changed with `msgspec.structs.replace`.

    Raises:
        ModelError: The file can't be read, or one of the settings can't be used.
    """
    path = folder / "generation_config.json"
    found = _read_json(path)
    do_sample = found.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{path}: do_sample is {do_sample!r}; it must be true or false")
    values: dict[str, Any] = {}
    for name, (kind, holds, wanted) in _SAMPLING.items():
        value = found.get(name)
        if value is None:
            continue
        is_number = type(value) is int or (kind is float and type(value) is float)
        if not is_number or not math.isfinite(value) or not holds(value):
            raise ModelError(f"{path}: {name} is {value!r}; it must be {wanted}")
        values[name] = kind(value)
    if do_sample is False:
        values["temperature"] = 0.0
    return SamplingParams(**values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content
