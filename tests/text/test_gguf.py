"""GGUF files: what their header says, the folder that stands for one, and broken ones refused."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nano_inference.config import ModelError
from nano_inference.text import gguf as our_gguf
from nano_inference.text.gguf_facts import LINK, facts_of
from nano_inference.text.gguf_header import read_header
from nano_inference.text.model_folder import folder_of
from nano_inference.text.tokenizer import (
    default_sampling_params,
    find_tokenizer,
    load_tokenizer,
    stop_token_ids_of,
)

from ..gguf_files import TINY, Change, nothing, write_gguf

TEXTS = (
    "98 + 25 =",
    "<|im_start|>user\nHi<|im_end|>\n<think>é</think>",
    "  two  spaces\t\n\n it's 12345 naïve ﬁ 日本 🙂 <s>",
)
PARAMETERS = 1_206_912


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's converted files."""
    place = tmp_path / "kept"
    place.mkdir()
    monkeypatch.setattr(our_gguf, "_cache_folder", lambda: place)
    return place


def refused(path: Path, words: str, read: Callable[[Path], object] = folder_of) -> None:
    with pytest.raises(ModelError, match=words, check=lambda e: e.code == "model_unavailable"):
        read(path)


# --- the header ---------------------------------------------------------------------------------


def test_a_header(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", "Q4_0"))
    assert (header.architecture, header.num_parameters) == ("qwen2", PARAMETERS)
    assert header.types == {"Q4_0": 36, "F32": 26}
    assert (header.token_id("eos"), header.token_id("eot"), header.token_id("eom")) == (2, 0, None)
    assert header.metadata["tokenizer.ggml.tokens"] == 768
    assert header.unread_positions == ()


@cache
def whole() -> bytes:
    """A file of each kind of value, and its header's size."""

    def values(writer: gguf.GGUFWriter) -> None:
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_float64("some.float", 0.5)
        writer.add_bool("some.truth", True)

    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf", "Q4_0", change=values).read_bytes()


@contextmanager
def written(content: bytes) -> Iterator[Path]:
    """The content in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        yield path


HEADER_BYTES = 24_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GGUF", "cut off"),
        (b"PK\x03\x04" + bytes(100), "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "is GGUF 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "cut off or broken"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut off or broken"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(99), "cut off or broken"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "does not say its general.architecture"),
    ],
)
def test_invalid_headers_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, words)
    assert list(tmp_path.glob("kept/[!.]*")) == []


@pytest.mark.parametrize("element", [4, 8, 9, 77])
def test_an_array_without_end(tmp_path: Path, element: int) -> None:
    path = tmp_path / "m.gguf"
    entry = struct.pack("<Q1sIIQ", 1, b"a", 9, element, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(1000))
    refused(path, "array of the unsupported type" if element > 8 else "cut off or broken")


@given(st.integers(0, HEADER_BYTES))
def test_a_file_that_is_cut_off_anywhere(size: int) -> None:
    with written(whole()[:size]) as path:
        refused(path, "cut off|empty|no GGUF", read_header)


@given(st.integers(0, HEADER_BYTES), st.binary(min_size=1, max_size=9))
def test_a_header_with_other_bytes_in_it_is_read_or_refused(at: int, other: bytes) -> None:
    """Other errors, hangs and memory without end are what this looks for."""
    changed = whole()[:at] + other + whole()[at + len(other) :]
    with written(changed) as path, suppress(ModelError):
        assert read_header(path).num_parameters > 0


def test_weights_that_are_cut_off(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q8_0")
    os.truncate(path, path.stat().st_size - 64)
    refused(path, r"is cut off: it has \d+ bytes, and '.*' ends at \d+; copy or download it again")


Said = dict[str, Any]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"qwen2.block_count": 2**31}, "62 tensors for 2147483648 layers"),
        ({"qwen2.block_count": 1025}, "62 tensors for 1025 layers"),
        ({"qwen2.embedding_length": 2**31}, "embedding_length 2147483648, and no tensor"),
        ({"qwen2.feed_forward_length": 2**31}, "feed_forward_length 2147483648, and no tensor"),
        ({"split.count": 3}, "one of 3 parts .* with `llama-gguf-split --merge`"),
        ({"general.alignment": 3}, "general.alignment 3"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "Transformers can't read .* IndexError"),
        ({"tokenizer.ggml.model": "rwkv"}, "Transformers can't read .* 'rwkv'"),
    ],
)
def test_impossible_headers_are_refused(tmp_path: Path, said: Said, words: str) -> None:
    refused(write_gguf(tmp_path / "m.gguf", change=saying(**said)), words)


@pytest.mark.parametrize("overlap", [1, 4096])
def test_tensors_that_overlap_are_refused(tmp_path: Path, overlap: int) -> None:
    """Else each could claim all of the file, and a small file all memory."""
    path = write_gguf(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", content, place)
    struct.pack_into("<Q", content, place, offset - overlap)
    path.write_bytes(content)
    refused(path, r"has 'blk\..*' at byte \d+ of its data, where '.*' still is")


@pytest.mark.parametrize(
    ("key", "count", "words"),
    [
        ("some.bytes", (1 << 16) + 1, "it may have 65536 there"),
        ("tokenizer.some", 1 << 21, "and 2097152 in all"),
    ],
)
def test_arrays_have_a_bound(tmp_path: Path, key: str, count: int, words: str) -> None:
    """The gguf package keeps hundreds of bytes of each element."""

    path = write_gguf(tmp_path / "m.gguf")
    magic, version, tensors, entries = struct.unpack_from("<4sIQQ", content := path.read_bytes())
    name, kinds = key.encode(), (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    # The package writes an array byte by byte.
    array = struct.pack(f"<Q{len(name)}sIIQ", len(name), name, *kinds, count) + bytes(count)
    head = struct.pack("<4sIQQ", magic, version, tensors, entries + 1)
    path.write_bytes(head + array + content[len(head) :])
    refused(path, words)


def saying(**said: Any) -> Change:
    """Writes these in place of what there is."""

    def change(writer: gguf.GGUFWriter) -> None:
        for name, value in said.items():
            writer.kv_data[0].pop(name, None)
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            if isinstance(value, float):
                add = writer.add_float32
            add(name, value)

    return change


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "m.gguf", architecture="starship"), "starship is not supported")


# --- the folder that stands for a file ----------------------------------------------------------


def test_the_folder_has_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    ours, own = load_tokenizer(write_gguf(tmp_path / "m.gguf", "Q4_0")), load_tokenizer(TINY)
    for text in TEXTS:
        ids = own(text).input_ids
        assert ours(text).input_ids == ids
        for skip in (True, False):
            kept, wanted = (each.decode(ids, skip_special_tokens=skip) for each in (ours, own))
            assert kept == wanted
    assert ours.chat_template == own.chat_template
    assert ours.eos_token == "<|im_end|>"


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """A vocabulary as Llama 2's: pieces with scores, bytes, no merges; text begins with <s>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    words = ["▁", *"acehilnorst", "▁t", "he", "▁the", "in", "ing", "an", "▁a"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_scores([0.0] * len(pieces) + [-float(i) for i in range(len(words))])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def byte_level(writer: gguf.GGUFWriter) -> None:
    """A vocabulary as Llama 3's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "th", "<|begin|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(True)


@pytest.mark.parametrize("tokenizer", [sentencepiece, byte_level])
def test_tokenizers_of_llamas_are_those_that_transformers_makes(
    tmp_path: Path, tokenizer: Change
) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="llama", tokenizer=tokenizer)
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)


def test_end_tokens_come_from_the_file(tmp_path: Path) -> None:
    change = saying(**{"tokenizer.ggml.eom_token_id": 3})
    path = write_gguf(tmp_path / "m.gguf", change=change)
    assert stop_token_ids_of(path, None) == {0, 2, 3}


def test_the_makers_advice_on_sampling(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    params = default_sampling_params(write_gguf(tmp_path / "m.gguf", change=saying(**said)))
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 20, 1.0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")],
)
def test_the_type_that_auto_takes(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = folder_of(write_gguf(tmp_path / "m.gguf", kind))
    assert f'"dtype": "{dtype}"' in (folder / "config.json").read_text()
    facts = facts_of(folder)
    assert facts.quantized == (("Q4_0",) if kind == "Q4_0" else ())
    assert (facts.num_parameters, facts.file) == (PARAMETERS, str(tmp_path / "m.gguf"))


def test_positions_that_transformers_does_not_read_are_reported(tmp_path: Path) -> None:
    change = saying(**{"qwen2.rope.scaling.type": "yarn"})
    facts = facts_of(folder_of(write_gguf(tmp_path / "m.gguf", change=change)))
    assert facts.unread == ("qwen2.rope.scaling ('yarn')",)


def test_the_configuration_sets_values_that_transformers_leaves_at_defaults(tmp_path: Path) -> None:
    change = saying(**{"gemma2.attention.key_length": 128, "gemma2.final_logit_softcapping": 20.0})
    folder = folder_of(write_gguf(tmp_path / "m.gguf", architecture="gemma2", change=change))
    config = json.loads((folder / "config.json").read_text())
    expected = config["hidden_size"] // config["num_attention_heads"]
    assert (config["query_pre_attn_scalar"], config["final_logit_softcapping"]) == (expected, 20)


def test_a_file_without_a_tokenizer_takes_token_ids_alone(tmp_path: Path) -> None:
    assert find_tokenizer(write_gguf(tmp_path / "m.gguf", tokenizer=nothing)) is None


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_gguf(folder / "m.gguf")
    # Of another model; the file has its own.
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert folder_of(folder) == folder_of(path)
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    write_gguf(folder / "other.gguf")
    refused(folder, r"holds 2 GGUF files \(m.gguf, other.gguf, …\); name one")
    (folder / "config.json").write_text("{}")
    assert folder_of(folder) == folder


def test_the_folder_is_made_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    made: list[Path] = []

    def read(file: Path) -> Any:
        made.append(file)
        return read_header(file)

    monkeypatch.setattr(our_gguf, "read_header", read)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(folder_of, [path] * 4))
    assert (len(folders), made) == (1, [path])
    # Another file under the same name is another model.
    path.unlink()
    write_gguf(path, "Q8_0")
    assert folder_of(path) not in folders
    assert len(made) == 2


def test_where_nothing_can_be_kept_it_lasts_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_gguf, "_cache_folder", lambda: None)
    path = write_gguf(tmp_path / "m.gguf")
    folder = folder_of(path)
    assert (folder / LINK).samefile(path)
    assert folder_of(path) == folder
    our_gguf._until_exit().close()
    assert not folder.exists()
    our_gguf._made_for_this_process.cache_clear()


@pytest.mark.slow
def test_a_process_without_torch_has_another_one_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes()[:100])
    started: list[object] = []
    run = subprocess.run

    def count(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return run(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", count)
        patch.setitem(sys.modules, "torch", None)
        refused(bad, "is cut off or broken")
        assert started == [], "a header is read in any process"
        folder = folder_of(path)
        assert len(started) == 1
    assert load_tokenizer(folder)("98 + 25 =").input_ids == [28, 27, 284, 224, 21, 24, 285]


def test_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> Any:
        return None if name == "gguf" else find(name)

    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", without)
    refused(path, r"need the package gguf; pip install 'nano-inference\[gguf\]'")
