from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nano_inference.config import Config, ModelError, RequestError, SamplingParams
from nano_inference.stages.admission.checks import check_sampling
from nano_inference.text.longest_token import longest_token_bytes
from nano_inference.text.tokenizer import (
    ANY_LENGTH,
    check_text_fits,
    default_sampling_params,
    find_tokenizer,
    load_tokenizer,
    special_token_ids,
    stop_token_ids_of,
)

from ..errors import raises
from ..gguf_files import TINY


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_comes_back_with_its_template(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load_tokenizer(folder)
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_a_loaded_tokenizer_has_its_vocabulary_once(folder: Path) -> None:
    # This class makes its backend of Python's objects, and keeps them.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = load_tokenizer(folder)
    assert type(loaded).__name__ == "Qwen2Tokenizer"
    assert not [name for name in ("_vocab", "_merges") if hasattr(loaded, name)]
    assert loaded.decode(loaded("abc")["input_ids"], skip_special_tokens=True) == "abc"


def test_models_are_those_that_transformers_lists() -> None:
    listed = transformers._class_to_module.items()  # type: ignore[attr-defined]
    own = {name: home.removeprefix("models.") for name, home in listed if home[:7] == "models."}
    made = transformers.models._class_to_module  # type: ignore[attr-defined]
    assert len(own) > 1000
    assert own.items() <= made.items()


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_model_without_any_tokenizer_has_none(folder: Path, tmp_path: Path) -> None:
    assert find_tokenizer(folder) is not None
    empty = tmp_path / "model"
    empty.mkdir()
    assert find_tokenizer(empty) is None
    # One that can't be used is not one that is not there.
    (empty / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        find_tokenizer(empty)
    with pytest.raises(ModelError, match="no model folder"):
        find_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "kind", ["Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast", ""]
)
def test_a_folder_with_only_the_tokenizers_settings_is_refused(folder: Path, kind: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind or None}))
    with pytest.raises(
        ModelError, match=r"holds no tokenizer\.json, and only the tokenizer's sett"
    ):
        find_tokenizer(folder)


def split(folder: Path) -> None:
    """Keep a byte-level vocabulary as vocab.json and merges.txt."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(" ".join(pair) for pair in content["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


def test_a_vocabulary_in_files_of_its_own_is_loaded_whole_or_refused(tmp_path: Path) -> None:
    split(tmp_path)
    text = "Question: 12 + 30 = ? naïve 🙂"
    loaded, expected = find_tokenizer(tmp_path), load_tokenizer(TINY)
    assert loaded is not None
    assert loaded(text).input_ids == expected(text).input_ids
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelError, match="merges"):
        find_tokenizer(tmp_path)


def test_a_tokenizer_of_added_tokens_alone_is_refused(tmp_path: Path) -> None:
    empty = Tokenizer(models.BPE())
    empty.add_special_tokens(["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=empty).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokens but 1 added"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(folder)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "Custom"
    settings["auto_map"] = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    path.write_text(json.dumps(settings))
    (folder / "custom.py").write_text("raise SystemExit('this ran')")
    try:
        loaded = load_tokenizer(folder)
    except ModelError:
        return
    assert isinstance(loaded, PreTrainedTokenizerFast)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {7}),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, {7, 9}),
        ({}, {"eos_token_id": 8}, {8}),
        (None, {"eos_token_id": [8]}, {8}),
        (None, {"eos_token_id": None}, {1}),
        (None, None, {1}),
    ],
)
def test_stop_ids(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    generation: dict[str, object] | None,
    config: dict[str, object] | None,
    ids: set[int],
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids_of(tmp_path, tokenizer) == ids


def test_a_model_without_stop_ids(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> None:
    assert stop_token_ids_of(tmp_path, word_tokenizer) == frozenset()


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}', "{", "[]"]
)
def test_unreadable_stop_ids(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        stop_token_ids_of(tmp_path, tokenizer)


# --- the makers' advice on sampling -------------------------------------------------------------


def advise(folder: Path, **settings: object) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return default_sampling_params(folder)


def test_the_makers_advice_comes_from_generation_config(tmp_path: Path) -> None:
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    found = advise(tmp_path, do_sample=True, repetition_penalty=1.05, eos_token_id=[1, 2], **advice)
    assert found == SamplingParams(**advice, repetition_penalty=1.05)


def test_without_advice_the_defaults_change_nothing(tmp_path: Path) -> None:
    assert default_sampling_params(tmp_path) == SamplingParams()
    assert advise(tmp_path, temperature=None, top_k=None, do_sample=None) == SamplingParams()
    assert advise(tmp_path, top_k=-1) == SamplingParams()


def test_do_sample_false_is_greedy_whatever_else_stands_there(tmp_path: Path) -> None:
    found = advise(tmp_path, do_sample=False, temperature=0.7, top_p=0.9)
    assert found == SamplingParams(temperature=0, top_p=0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("do_sample", "no"),
    ],
)
def test_advice_that_can_not_be_followed(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(
        ModelError, match=rf"generation_config\.json: {name} is .*(it must be|Expected)"
    ):
        advise(tmp_path, **{name: value})


EDGES = [0, 1, 10, 1e-4, 1e4, 2**63 - 1]
AT_THE_EDGES = [edge * nudge for edge in EDGES for nudge in (1, 0.99, 1.01)] + [-1, 2**63]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_advice_is_followed_exactly_where_admission_takes_it(tmp_path: Path, name: str) -> None:
    taken = []
    for value in AT_THE_EDGES:
        # Of generation_config.json -1 is off, as in Python.
        if name == "top_k" and (not isinstance(value, int) or value == -1):
            continue
        try:
            check_sampling(replace(SamplingParams(), **{name: value}), vocab_size=100)
        except RequestError:
            with pytest.raises(ModelError, match=name):
                advise(tmp_path, **{name: value})
        else:
            assert getattr(advise(tmp_path, **{name: value}), name) == value
            taken.append(value)
    assert 0 < len(taken) < len(AT_THE_EDGES)


@pytest.mark.parametrize("content", ["{", "[]", '"greedy"'])
def test_unreadable_advice(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        default_sampling_params(tmp_path)


# --- how long a text can be that fits -----------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(
    *tokens: str,
    normalizer: object = None,
    before: object = None,
    added: tuple[AddedToken, ...] = (),
    **options: object,
) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens, none of which are merged from others."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], **options))
    backend.normalizer, backend.pre_tokenizer = normalizer, before
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level(*added: AddedToken, normalizer: object = None) -> PreTrainedTokenizerFast:
    before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return bpe(*alphabet, normalizer=normalizer, before=before, added=added)


def metaspace(normalizer: object = None) -> PreTrainedTokenizerFast:
    before = pre_tokenizers.Metaspace()
    return bpe(*BYTES, "\u2581", "<unk>", before=before, normalizer=normalizer, byte_fallback=True)


BOUNDED = {
    "bundled": load_tokenizer(Config().engine.model_folder),
    "bytes": byte_level(),
    "added tokens": byte_level(AddedToken("end of turn"), AddedToken("\N{OHM SIGN}")),
    "byte fallback": metaspace(),
    "unknown characters": bpe("a", "<unk>", unk_token="<unk>"),
    "lower case": byte_level(normalizer=normalizers.Lowercase()),
    "fewer bytes": metaspace(normalizers.Replace("abcdef", "a")),
    "two normalizers": byte_level(
        normalizer=normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKC()])
    ),
    **{
        form: byte_level(normalizer=getattr(normalizers, form)())
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    },
}

UNBOUNDED = {
    "no tokens for some bytes": bpe("a", "b"),
    "unknown ones together": bpe("a", "<unk>", unk_token="<unk>", fuse_unk=True),
    "spaces beside a token": byte_level(AddedToken("<mask>", lstrip=True)),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "replaced by nothing": byte_level(normalizer=normalizers.Replace(" ", "")),
    "spaces split off": bpe(*BYTES, before=pre_tokenizers.Whitespace(), byte_fallback=True),
    "letters split off": bpe(
        *BYTES, before=pre_tokenizers.Split("a", "removed"), byte_fallback=True
    ),
}

# Text that normalizers shrink most, and that is spelled out in added tokens.
SHRINKING = st.sampled_from(
    [
        *("\N{KELVIN SIGN}", "\N{OHM SIGN}", "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab"),
        *("\U0001d400", "e\u0301", "abcdef", "end of turn", "<|im_end|>", "  "),
    ]
)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=40)
@given(parts=st.lists(SHRINKING | st.text(max_size=5), min_size=1, max_size=30))
@example(parts=["\N{KELVIN SIGN}"] * 50)
@example(parts=["\u1fbe\u0308\u0301"] * 50)
@example(parts=["\U0001d400"] * 50)
@example(parts=["abcdef"] * 50)
@example(parts=[" "] * 200)
def test_no_text_is_longer_than_its_tokens_may_be(kind: str, parts: list[str]) -> None:
    tokenizer, text = BOUNDED[kind], "".join(parts)
    tokens = len(tokenizer(text)["input_ids"])
    longest = longest_token_bytes(tokenizer)
    assert len(text.encode()) <= tokens * longest < ANY_LENGTH
    check_text_fits(text, longest, tokens + 1)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_swallow_text_sets_no_bound(kind: str) -> None:
    assert longest_token_bytes(UNBOUNDED[kind]) == ANY_LENGTH


def test_words_that_have_no_token_set_no_bound(word_tokenizer: PreTrainedTokenizerFast) -> None:
    assert longest_token_bytes(word_tokenizer) == ANY_LENGTH


def test_a_token_has_as_many_bytes_as_it_stands_for() -> None:
    assert longest_token_bytes(byte_level()) == 4  # never less than a character
    assert longest_token_bytes(byte_level(AddedToken("end of turn"))) == 11
    assert longest_token_bytes(byte_level(normalizer=normalizers.NFC())) == 16


def test_a_tokenizers_own_truncation_is_not_applied() -> None:
    """Or texts that it cuts would fit, however long they are."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert len(tokenizer("a" * 100)["input_ids"]) == 100
    assert longest_token_bytes(tokenizer) == 4


def test_a_text_that_can_not_fit_is_refused_unread() -> None:
    check_text_fits("a" * 36, 4, max_model_len=10)
    with raises("prompt_too_long", r"maximum context length is 10 tokens.*37 bytes.*at least 10,"):
        check_text_fits("a" * 37, 4, max_model_len=10)
    with pytest.raises(RequestError, match="39 bytes"):
        check_text_fits("\udc80" * 13, 4, max_model_len=10)
    check_text_fits("a" * 100_000, ANY_LENGTH, max_model_len=2)


def test_special_tokens_are_those_that_a_grammar_can_not_spell(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    names = ("<a>", "<|a|>", "[A]", "<a", "<ä b>", "word")
    for special in (False, True):
        given = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        )
        added = [AddedToken(name, special=special, normalized=False) for name in names]
        given.add_tokens(added, special_tokens=special)
        to_llguidance = LLTokenizer(given.backend_tokenizer.to_str(), eos_token=[1])
        found = special_token_ids(given)
        assert set(found) == {"<s>", "</s>", *(names if special else ("<a>", "<|a|>", "<ä b>"))}
        for token_id in given.added_tokens_decoder:
            assert to_llguidance.is_special_token(token_id) == (token_id in found.values())
