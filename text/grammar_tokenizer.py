"""A model's tokenizer for the text that a grammar forces: by its vocabulary alone.

llguidance tokenises such text with the tokenizer itself, whose normalizer would change the text,
and whose added tokens would take the place of text that spells their names.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

_KEPT_NORMALIZERS = frozenset(("Prepend", "ByteLevel"))
"""Parts of another text's spelling in tokens, not of the text: llguidance undoes them."""


def is_special(content: str, *, special: bool) -> bool:
    """Return whether llguidance has an added token as special: no other tokens can spell it."""
    return special or (content.startswith("<") and content.endswith(">"))


def grammar_tokenizer(backend: Tokenizer) -> str:
    """Return a tokenizer of the same tokens, as JSON, that splits any text into its own bytes.

    Special tokens have other names there, which no text can spell; a grammar has to name them by
    their ids.
    """
    state = msgspec.json.decode(backend.to_str())
    state |= {"truncation": None, "padding": None, "post_processor": None}
    state["normalizer"] = _normalizer(state["normalizer"])
    _without_prefix(state["pre_tokenizer"])
    # Unguessable, so that no constraint has it as its text.
    mark = secrets.token_hex(16)
    names: dict[str, str] = {}
    for token in state["added_tokens"]:
        token |= {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        if is_special(token["content"], special=token["special"]):
            names[token["content"]] = token["content"] = f"<{mark} {token['id']}>"
            token["special"] = True
    _rename(state["model"], names)
    return msgspec.json.encode(state).decode()


def _normalizer(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what is left of a normalizer without the parts that change text."""
    if state is None:
        return None
    if state["type"] == "Sequence":
        parts = [part for part in map(_normalizer, state["normalizers"]) if part is not None]
        return {**state, "normalizers": parts} if parts else None
    spaces = state["type"] == "Replace" and state["pattern"] == {"String": " "}
    return state if spaces or state["type"] in _KEPT_NORMALIZERS else None


def _without_prefix(state: dict[str, Any] | None) -> None:
    """Let a pre-tokenizer put no space before a text, in place."""
    if state is None:
        return
    for part in state.get("pretokenizers", ()):
        _without_prefix(part)
    if state["type"] == "ByteLevel":
        state["add_prefix_space"] = False


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename special tokens in a model's vocabulary, in place."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]


def _makes(merge: list[str] | str, names: Mapping[str, str]) -> bool:
    """Return whether a merge has to do with a special token."""
    # Older files have both parts as one text.
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names


def spellings(
    backend: Tokenizer, tokenizer: LLTokenizer, stop_ids: Collection[int]
) -> dict[str, tuple[int, list[int]]]:
    """Return the added tokens that a text shows by their names, and how others spell these.

    A model writes such a token where a text has its name, as `<think>`.

    Returns:
        By name, the id, and the ids of the other tokens.
    """
    found = {}
    for token_id, token in backend.get_added_tokens_decoder().items():
        name = token.content
        hidden = token.special or token_id in stop_ids
        if not hidden and is_special(name, special=False):
            spelled = tokenizer.tokenize_str(name)
            if tokenizer.decode_bytes(spelled) == name.encode():
                found[name] = token_id, spelled
    return found
