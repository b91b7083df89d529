"""Behind each event of a stream comes the exact rest, wherever its chunks are cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.public import Completion, CompletionChunk, GenerateRequest, Output
from nano_inference.config import Config, RequestError
from nano_inference.gateway.api.openai.answers import ChoicesWriter
from nano_inference.gateway.api.openai.positions import (
    FINISHED,
    UNBEGUN,
    Position,
    answer_of,
    read_position,
)
from nano_inference.gateway.api.openai.requests import ChoicesCall, read_chat, read_completion
from nano_inference.gateway.api.openai.streams import Chunks
from nano_inference.gateway.call import Account

from ...fake import completion
from ...made import cut, interleaved, told, whole
from ...sampled import WORDS
from .streamed import Event, Recorded

PROMPTS = [(3, 4, 5), (8, 9)]
ALL: dict[str, Any] = {
    "return_token_ids": True,
    "return_weight_versions": True,
    "stream_options": {"include_usage": True},
}
SHAPES: dict[str, dict[str, Any]] = {
    "text": {},
    "all": ALL,
    "logprobs": {"logprobs": 2} | ALL,
    "echo": {"echo": True, "logprobs": 1} | ALL,
    "echo-alone": {"echo": True},
    "scores": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "two-prompts": {"prompt": [list(each) for each in PROMPTS], "logprobs": 0} | ALL,
}
CHATS: dict[str, dict[str, Any]] = {"text": {}, "all": {"logprobs": True, "top_logprobs": 1} | ALL}


def asked(name: str, n: int) -> tuple[ChoicesCall, list[Any]]:
    body = {"prompt": list(PROMPTS[0]), "stream": True, "n": n}
    return read_completion(body | SHAPES[name], Config())


def chatted(name: str, n: int) -> tuple[ChoicesCall, list[Any]]:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": n}
    return read_chat(body | CHATS[name], Config(), 8192)[0], [PROMPTS[0]]


def begun_late(request: GenerateRequest) -> list[Output]:
    """The first sample is the last to begin, and brings the prompt's logprobs."""
    made = interleaved(request)
    end = made[-1]
    assert isinstance(end, Completion)
    made.sort(key=lambda output: getattr(output, "sample_index", 99) == 0)
    made = [each for each in made if not isinstance(each, Completion)] + [end]
    first = next(
        place
        for place, each in enumerate(made)
        if isinstance(each, CompletionChunk) and each.sample_index == 0
    )
    made[first] = msgspec.structs.replace(
        made[first],
        prompt_logprobs=end.prompt_logprobs,
        prompt_top_logprobs=end.prompt_top_logprobs,
    )
    return made


def cancelled(request: GenerateRequest) -> list[Output]:
    """It ends after one token, with a word that was held back."""
    (one,) = cut(request)
    assert isinstance(one, CompletionChunk)
    samples = [told(request, one.sample_index, "abort")]
    return [one, completion(request, *samples, status="cancelled")]


class Client:
    """Reads a stream; of how many outputs come until it has read the next event, `pace` tells."""

    def __init__(self, call: ChoicesCall, prompts: list[Any]) -> None:
        self._call, self._prompts = call, prompts

    def requests(self) -> list[GenerateRequest]:
        number = len(self._prompts)
        return [
            self._call.request(place, number, prompt, "t")
            for place, prompt in enumerate(self._prompts)
        ]

    async def read(
        self, outputs: list[tuple[int, Output]], pace: Sequence[int], after: str = ""
    ) -> list[Event]:
        """Events behind one, or all of them."""
        answers = ChoicesWriter(self._call, self._prompts, [None] * len(self._prompts), WORDS)
        sent: list[Event] = []
        room = anyio.Semaphore(0)

        async def send(data: bytes, event_id: str = "") -> None:
            sent.append(Event(event_id, json.loads(data)))
            await room.acquire()

        number = len(self._prompts) * self._call.n
        position = read_position(after, self._call.id, number) if after else None
        chunks = Chunks(answers, send, position)
        async with anyio.create_task_group() as group:
            group.start_soon(chunks.send_all)
            for place, (prompt, output) in enumerate(outputs):
                chunks.put(prompt, output)
                for _ in range(pace[place % len(pace)]):
                    room.release()
                await anyio.lowlevel.checkpoint()
            for _ in range(4 * len(outputs) + 4 * number):
                room.release()
            chunks.close()
        ended = [output for _, output in outputs if isinstance(output, Completion)]
        await chunks.send_usage(ended, Account())
        return sent


MAKERS = [interleaved, begun_late, whole, cancelled]
CASES = [
    *((asked, name, n) for name in SHAPES for n in (1, 3)),
    *((chatted, name, n) for name in CHATS for n in (1, 3)),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("ask", "name", "n"), CASES)
async def test_behind_each_event_comes_the_exact_rest(
    make: Any, ask: Any, name: str, n: int
) -> None:
    client = Client(*ask(name, n))
    outputs = [
        (prompt, output)
        for prompt, request in enumerate(client.requests())
        for output in make(request)
    ]
    for pace in ([0], [1], [9], [2, 0, 0]):
        events = await client.read(outputs, pace)
        wanted = vars(Recorded(events))
        assert len({event.event_id for event in events}) == len(events)
        for number, event in enumerate(events, 1):
            for other_pace in ([0], [9]):
                rest = await client.read(outputs, other_pace, after=event.event_id)
                assert vars(Recorded([*events[:number], *rest])) == wanted
                assert (rest[-1:] or events[-1:])[0].event_id == events[-1].event_id


SENT = st.lists(st.one_of(st.just(UNBEGUN), st.just(FINISHED), st.integers(0, 10**6)), min_size=1)


@given(SENT, st.booleans())
def test_an_id_says_what_was_sent(sent: list[int], usage: bool) -> None:
    position = Position("cmpl-a_b", len(sent))
    for index, number in enumerate(sent):
        if number != UNBEGUN:
            position.move(index, number)
    position.usage = usage
    event_id = position.event_id
    assert answer_of(event_id) == "cmpl-a_b"
    again = read_position(event_id, "cmpl-a_b", len(sent))
    assert [again[index] for index in range(len(sent))] == sent
    assert (again.usage, again.event_id) == (usage, event_id)


def test_ids_of_many_choices_are_short() -> None:
    position = Position("cmpl-a", 8192)
    for index in range(4000):
        position.move(index, FINISHED)
    position.move(4001, 12)
    assert position.event_id == "cmpl-a.f~4000.x.12.x~4190"


@pytest.mark.parametrize(
    "event_id",
    [
        "", ".", "cmpl-a", "cmpl-a.", "cmpl-a.x", "cmpl-a.x.x.x", "cmpl-a.x~3", "cmpl-a.x~0.x.x",
        "cmpl-a.1.y", "cmpl-a.-1.x", "cmpl-b.x.x", "cmpl-a.x.x.v", "cmpl-a.x.x\n", 
        "cmpl-a.1~9999999",
        "cmpl-a.1e9.x", "x" * 200 + ".x.x", "cmpl-a.٣.x", "cmpl-a.9999999999.x",
    ],
)  # fmt: skip
def test_an_invalid_event_id_is_refused(event_id: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_position(event_id, "cmpl-a", 2)
    assert refusal.value.code == "invalid_event_id"
