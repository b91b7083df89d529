"""Ollama's own library, sync and async."""

from __future__ import annotations

import given
import ollama
from person import Person
from promises import URL, cancels, keep, promise, raises

client = ollama.Client(URL)
GREEDY = {"temperature": 0}


def asked(text: str = given.SUM, **options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": given.MODEL, "messages": messages, "options": GREEDY} | options


@promise
def answer_has_text_and_counts() -> None:
    for model in (given.MODEL, f"{given.MODEL}:latest"):
        answer = client.chat(**asked(model=model))
        assert answer.message.content == given.TOTAL
        assert (answer.done, answer.done_reason, answer.model) == (True, "stop", model)
        assert answer.prompt_eval_count > 0
        assert answer.eval_count / answer.eval_duration > 0
        assert answer.total_duration > 0


@promise
async def stream_is_the_answer_in_parts() -> None:
    parts = list(client.chat(**asked(stream=True)))
    assert "".join(part.message.content for part in parts) == given.TOTAL
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    asynchronous = ollama.AsyncClient(URL)
    text = ""
    async for part in await asynchronous.chat(**asked(stream=True)):
        text += part.message.content
    assert text == given.TOTAL


@promise
def prompt_is_continued_by_its_context() -> None:
    first = client.generate(given.MODEL, given.SUM, options=GREEDY)
    assert first.response == given.TOTAL
    second = client.generate(given.MODEL, given.SUM, context=first.context, options=GREEDY)
    assert list(second.context[: len(first.context)]) == list(first.context)
    raw = client.generate(given.MODEL, "98 + 25 =", raw=True, options=GREEDY | {"num_predict": 4})
    assert raw.response.startswith(" 123")


@promise
def options_reach_the_sampler() -> None:
    every = ollama.Options(
        num_ctx=4096, num_predict=9, temperature=0.7, seed=5, top_k=30, top_p=0.8, min_p=0.01,
        repeat_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, stop=["zzz"], num_thread=4,
        mirostat=0, tfs_z=1.0, typical_p=1.0,
    )  # fmt: skip
    texts = {client.chat(**asked(given.PERSON, options=every)).message.content for _ in range(2)}
    assert len(texts) == 1


@promise
def parsed_answer_keeps_its_schema() -> None:
    answer = client.chat(**asked(given.PERSON, format=Person.model_json_schema()))
    Person.model_validate_json(answer.message.content)
    parts = client.chat(**asked(given.PERSON, format="json", stream=True))
    assert "".join(part.message.content for part in parts).startswith("{")


@promise
def tool_is_called_and_its_result_taken() -> None:
    question = {"role": "user", "content": given.FORECAST}
    for stream in (False, True):
        made = asked(messages=[question], tools=[given.get_weather], stream=stream)
        answers = list(client.chat(**made)) if stream else [client.chat(**made)]
        (call,) = [each for answer in answers for each in answer.message.tool_calls or ()]
        assert call.function.name == "get_weather"
        result = given.get_weather(**call.function.arguments)
        assert given.cities[-1] == "Oslo"
        messages = [
            question,
            ollama.Message(role="assistant", tool_calls=[call]),
            {"role": "tool", "tool_name": "get_weather", "content": result},
        ]
        assert client.chat(**asked(messages=messages, tools=[given.get_weather])).message.content


@promise
def logprobs_name_each_token() -> None:
    answer = client.generate(given.MODEL, given.SUM, logprobs=True, top_logprobs=2, options=GREEDY)
    assert "".join(each.token for each in answer.logprobs).startswith(given.TOTAL)
    assert all(len(each.top_logprobs) == 2 for each in answer.logprobs)


@promise
def texts_are_embedded() -> None:
    embedded = client.embed(given.MODEL, ["a", given.TOO_LONG])
    assert [round(sum(x * x for x in each), 3) for each in embedded.embeddings] == [1, 1]
    assert len(client.embed(given.MODEL, "a", dimensions=7).embeddings[0]) == 7
    assert client.embeddings(given.MODEL, "a").embedding


@promise
def models_are_listed_shown_and_pulled() -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == f"{given.MODEL}:latest"
    assert running.context_length == given.CONTEXT_LENGTH
    shown = client.show(given.MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["general.parameter_count"] > 0
    assert client.pull(given.MODEL).status == "success"
    assert [each.status for each in client.pull(given.MODEL, stream=True)][-1] == "success"


@promise
def errors_have_their_class_and_status() -> None:
    with raises(ollama.ResponseError, str(given.CONTEXT_LENGTH)):
        client.chat(**asked(given.TOO_LONG))
    with raises(ollama.ResponseError, "top_p"):
        client.chat(**asked(options={"top_p": 7}))
    for call in (client.chat, client.pull):
        with raises(ollama.ResponseError, "none", "status code: 404"):
            call("none")
    with raises(ollama.ResponseError, "settings"):
        client.copy(given.MODEL, "other")
    with raises(ollama.ResponseError, "stays"):
        client.delete(given.MODEL)


@promise
def closing_a_stream_cancels_it() -> None:
    options = {"num_predict": given.ENDLESS_TOKENS}
    form = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
    with cancels():
        stream = client.chat(**asked(stream=True, format=form, options=options))
        next(stream)
        stream.close()


keep()
