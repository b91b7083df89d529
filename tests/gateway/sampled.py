"""Samples of the bundled tokenizer's tokens, as the streaming stage sends them."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from nano_inference.bus.messages import RequestOpened, RowFinish
from nano_inference.bus.public import CompletionChunk, CompletionSample, GenerateRequest
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.gateway.serving.tokenizer import Tokenizer
from nano_inference.stages.streaming.samples import RequestState
from nano_inference.text.detokenizer import TokenPieces
from nano_inference.text.messages import Reading, Tool
from nano_inference.text.messages.message_format import known_formats
from nano_inference.text.tokenizer import load_tokenizer, stop_token_ids_of

from .fake import chunk

FOLDER = EngineConfig().model_folder
TOKENIZER = load_tokenizer(FOLDER)
WORDS = Tokenizer(TOKENIZER, stop_token_ids_of(FOLDER, TOKENIZER))
PIECES = TokenPieces(TOKENIZER.backend_tokenizer)
FORMATS = {form.name: form for form in known_formats()}
# In one format a call ends with a mark; in the other with the next call, or the message.
QWEN, LLAMA = FORMATS["qwen"], FORMATS["llama"]
READING = Reading(tools=(Tool(name="add"),))

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
BARE_CALL = '{"name": "add", "parameters": {"a": 1}}'
PHRASES = (
    "<think>",
    "</think>\n\n",
    BARE_CALL,
    CALL,
    CALL[:20],
    CALL[20:],
    "<tool_call>no call</tool_call>",
    "STOP",
    "ST",
    "OP 12",
    "Grüße, 漢字 🙂",
    "<|im_",
    "a b",
    *SPECIAL,
)


REQUEST = GenerateRequest(request_id="r")
_SUMMED = ("token_ids", "logprobs", "text")


class Made(NamedTuple):
    """A sample in chunks of one token, and whole."""

    chunks: list[CompletionChunk]
    sample: CompletionSample
    sampling: SamplingParams


def ids(text: str) -> list[int]:
    return list(WORDS.token_ids(text, add_special=False))


def make(
    token_ids: list[int], stop: tuple[str, ...] = (), end: RowFinish = "length", min_tokens: int = 0
) -> Made:
    """The outputs of the streaming stage for these tokens; the last one ends the sample."""
    token_ids = token_ids + ids("<|im_end|>") * (end == "stop")
    opened = RequestOpened(
        request_id="r",
        entry_id="1-0",
        model="tiny",
        n=1,
        stream=True,
        stop=stop,
        prompt_token_ids=(5,),
        min_tokens=min_tokens,
    )
    sample = RequestState(opened, PIECES).add(0)
    chunks = []
    for place, token_id in enumerate(token_ids):
        reason: RowFinish = end if place == len(token_ids) - 1 else ""
        text = sample.advance(token_id, -0.5 * place, reason, 3 + place // 4)
        found = {"logprobs": (-0.5 * place,), "finish_reason": sample.finish_reason}
        version = 3 + place // 4
        chunks.append(
            chunk(REQUEST, (token_id,), text, token_offset=place, weight_version=version, **found)
        )
        if sample.finish_reason is not None:
            break
    sampling = SamplingParams(stop=stop, min_tokens=min_tokens)
    return Made(chunks, sample.result(), sampling)


def joined(chunks: list[CompletionChunk], sizes: list[int]) -> list[CompletionChunk]:
    """The same chunks, joined where one weight version made them."""
    found: list[CompletionChunk] = []
    room = 0
    for place, each in enumerate(chunks):
        last = found[-1] if found else None
        if last is None or room <= 0 or last.weight_version != each.weight_version:
            found.append(each)
            room = sizes[place % len(sizes)]
            continue
        sums = {name: getattr(last, name) + getattr(each, name) for name in _SUMMED}
        found[-1] = replace(last, finish_reason=each.finish_reason, **sums)
        room -= 1
    return found


tokens = st.lists(
    st.one_of(
        st.sampled_from(PHRASES).map(ids),
        # Parts of characters among them.
        st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=4),
    ),
    min_size=1,
    max_size=8,
).map(lambda parts: [each for part in parts for each in part] or [5])
stops = st.sampled_from(
    [(), ("STOP",), ("OP", "STOP"), ("字",), ("\ufffd",), ("</think>",), ("b<",)]
)
ends = st.sampled_from(["length", "stop"])
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)
