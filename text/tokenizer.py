"""Tokenizer, stop ids and default sampling parameters of a model's folder."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelError, RequestError, SamplingParams, missing_model, prompt_too_long, shown
from ..config.collector import collector_paused
from ..config.errors import ParameterError
from .grammar_tokenizer import is_special
from .model_folder import folder_of, read_json
from .tokenizer_files import check_vocabulary, has_tokenizer, no_vocabulary
from .transformers_models import import_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ANY_LENGTH = sys.maxsize
"""Bytes of a token that may represent text of any length."""


def find_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Return `load_tokenizer`'s result; None for a model without tokenizer, which serves token ids
    only.

    Raises:
        ModelError: There is no such folder, or its tokenizer can't be used.
    """
    folder = folder_of(folder)
    if folder.is_dir() and not has_tokenizer(folder):
        return None
    return load_tokenizer(folder)


@collector_paused()
def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with its chat template, of a folder in Transformers' format or a GGUF
    file.

    Nothing is downloaded and no code from the folder is run.

    Raises:
        ModelError: The folder or its tokenizer is missing or unreadable, or the tokenizer is not
            one of the `tokenizers` library (a "fast" one).
    """
    # Imported here because it takes seconds and imports torch, which clients and tests of the cores
    # don't need.
    import_models()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = folder_of(folder)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; {missing_model(folder)}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"{folder} holds no tokenizer.json; save the model's tokenizer there with "
            f"tokenizer.save_pretrained()"
        )
    check_vocabulary(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # For a broken tokenizer.json the tokenizers library raises Exception itself.
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the tokenizer in {folder} can't be loaded: {first_line:.300}",
            remedy="save the model's tokenizer there with tokenizer.save_pretrained()",
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or len(tokenizer) == 0:
        raise ModelError(
            f"the tokenizer in {folder} is not backed by a tokenizer.json; convert it to one "
            f"(a fast tokenizer) and save it there"
        )
    if not tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False):
        raise ModelError(
            f"the tokenizer in {folder} has no tokens but {len(tokenizer)} added ones; save the "
            "model's tokenizer there with tokenizer.save_pretrained()"
        )
    if not (folder / "tokenizer.json").is_file():
        # Without one of these files its class makes a tokenizer of whatever is there.
        files = tokenizer.vocab_files_names.values()
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing != ["tokenizer.json"] or len(files) == 1:
            raise no_vocabulary(folder, f"{type(tokenizer).__name__} needs {', '.join(missing)}")
    # Some classes keep what they have made their backend of: 52 MB for 151,643 tokens.
    for name in ("_vocab", "_merges"):
        vars(tokenizer).pop(name, None)
    return tokenizer


def special_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return ids by name of tokens whose names other tokens can't spell in a grammar.

    llguidance treats these, and all added tokens of the form `<…>`, as special.
    """
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if is_special(token.content, special=token.special)
    }


def check_text_fits(
    text: str, longest_token_bytes: int, max_model_len: int, *, room: int = 1
) -> None:
    """Refuse a text that is too long however it is tokenised, before tokenising it.

    Args:
        longest_token_bytes: The result of the function of this name.
        max_model_len: Limit of prompt and completion together, in tokens.
        room: Tokens to be left free after the prompt.

    Raises:
        RequestError: prompt_too_long.
    """
    most_bytes = longest_token_bytes * (max_model_len - room)
    # Most texts fit, whatever their encoding.
    if len(text) * 4 <= most_bytes:
        return
    size_bytes = len(text.encode(errors="surrogatepass"))
    if size_bytes > most_bytes:
        least = math.ceil(size_bytes / longest_token_bytes)
        given = f"the prompt has {size_bytes} bytes, which make at least {least}"
        raise prompt_too_long(max_model_len, given, "shorten it")


def encode(
    text: str, tokenizer: PreTrainedTokenizerFast, *, add_special_tokens: bool, code: str
) -> tuple[int, ...]:
    """Return the token ids of a text.

    Raises:
        RequestError: It can't be read; with this code.
    """
    try:
        text.encode()
        backend, own = tokenizer.backend_tokenizer, tokenizer.split_special_tokens
        # Settings that the call changes.
        settled = (
            not (backend.truncation or backend.padding) and backend.encode_special_tokens == own
        )
        kind: Any = type(tokenizer)
        if settled and _has_library_call(kind):
            found = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return tuple(found[0].ids)
        # verbose: no warning about lengths, which callers check themselves.
        encoded = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    except UnicodeEncodeError:
        raise RequestError(
            "the text holds a lone surrogate; send valid Unicode", code=code
        ) from None
    # The tokenizers library raises Exception itself, for example for a character that a vocabulary
    # without an "unknown" token lacks.
    except Exception as error:
        raise RequestError(
            f"the model's tokenizer can't read the text: {shown(str(error))}",
            code=code,
            remedy="send other text, or token ids",
        ) from error
    return tuple(encoded["input_ids"])


@cache
def _has_library_call(kind: Any) -> bool:
    """Return whether the call is Transformers', which takes thrice its backend's time."""
    from transformers import PreTrainedTokenizerFast as Library

    return kind.__call__ is Library.__call__ and kind._encode_plus is Library._encode_plus


def parts_of(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer, pre-tokenizer or decoder, those of a Sequence one by one.

    Args:
        inside: Name of a Sequence's list.
    """
    if part is not None:
        yield from _unpacked(json.loads(part.__getstate__()), inside)


def _unpacked(state: dict[str, Any], inside: str) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for part in state[inside]:
            yield from _unpacked(part, inside)
    else:
        yield state


def stop_token_ids_of(folder: Path, tokenizer: PreTrainedTokenizerFast | None) -> frozenset[int]:
    """Return the ids that end a generation by default.

    As in Transformers' `generate`: `eos_token_id` of generation_config.json, else of config.json,
    else the tokenizer's own. Empty if the model has none.

    Raises:
        ModelError: One of the two files can't be read, or holds an invalid id.
    """
    folder = folder_of(folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = _settings(path).get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ModelError(f"{path}: eos_token_id is {eos!r}; it must be an id or a list")
            return frozenset(ids)
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset() if own is None else frozenset((int(own),))


_ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings taken from generation_config.json."""


def default_sampling_params(folder: Path) -> SamplingParams:
    """Return the sampling parameters that generation_config.json in the model's folder recommends.

    temperature, top_k, top_p, min_p and repetition_penalty are read; absent or null ones keep their
    default, which has no effect. `do_sample: false` means temperature 0.

    They are never applied silently: RL needs tokens from the model's own distribution, or the
    logprobs that training uses belong to another policy; and a request must not change its meaning
    with the model. To use them, call this and pass the result, changed with
    `msgspec.structs.replace`.

    Raises:
        ModelError: The file can't be read, or a setting can't be used.
    """
    path = folder_of(folder) / "generation_config.json"
    settings = _settings(path)
    do_sample = settings.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{path}: do_sample is {do_sample!r}; it must be true or false")
    values = {name: settings[name] for name in _ADVISED if settings.get(name) is not None}
    if do_sample is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        raise ModelError(f"{path}: {error}") from None


def _settings(path: Path) -> dict[str, Any]:
    content = read_json(path, {})
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content
