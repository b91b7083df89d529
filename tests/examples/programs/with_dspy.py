"""DSPy: answers by typed signatures, tools, and streams, by its own client and by LiteLLM."""

from __future__ import annotations

import os
from typing import Any, Literal

# Prices of models are not asked for.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import dspy
import given
import litellm
from dspy.utils import exceptions
from promises import URL, keep, promise, raises

# DSPy uses schemas and tools of a model only where LiteLLM knows that the model can do them.
can = {"supports_response_schema": True, "supports_function_calling": True}
litellm.register_model(
    {f"openai/{given.MODEL}": {"litellm_provider": "openai", "mode": "chat"} | can}
)


class Person(dspy.Signature):
    """Extract a person."""

    text: str = dspy.InputField()
    age: int = dspy.OutputField()
    job: Literal["chef", "pilot", "teacher"] = dspy.OutputField()


class Ask(dspy.Signature):
    """Answer with tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    outputs: dspy.ToolCalls = dspy.OutputField()


def model(name: str = given.MODEL, **options: Any) -> dspy.LM:
    asked = {"cache": False, "num_retries": 0, "temperature": 0, "max_tokens": 200} | options
    return dspy.LM(f"openai/{name}", api_base=f"{URL}/v1", api_key="none", **asked)


@promise
def answer_has_text_and_usage() -> None:
    for engine in ("auto", "litellm"):
        for kind in ("chat", "responses"):
            lm = model(engine=engine, model_type=kind)
            (answer,) = lm(given.SUM)
            assert given.TOTAL in (answer, answer["text"] if isinstance(answer, dict) else "")
            assert lm.history[-1]["usage"]["total_tokens"] > 0


@promise
def output_keeps_its_signature() -> None:
    with dspy.context(lm=model(engine="litellm"), adapter=dspy.JSONAdapter()):
        person = dspy.Predict(Person)(text=given.PERSON)
    assert isinstance(person.age, int)
    assert person.job in ("chef", "pilot", "teacher")


@promise
async def streamed_field_is_the_answer_in_parts() -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="job")
    predict = dspy.streamify(dspy.Predict(Person), stream_listeners=[listener])
    with dspy.context(lm=model(engine="litellm"), adapter=dspy.JSONAdapter()):
        parts = [part async for part in predict(text=given.PERSON)]
    *pieces, whole = parts
    assert isinstance(whole, dspy.Prediction)
    assert whole.job in "".join(piece.chunk for piece in pieces)


@promise
def tool_call_is_parsed() -> None:
    lm = model(engine="litellm", tool_choice="required")
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Ask)(question=given.FORECAST, tools=[dspy.Tool(given.get_weather)])
    assert answer.outputs.tool_calls[0].name == "get_weather"
    assert isinstance(answer.outputs.tool_calls[0].args["city"], str)


@promise
def errors_have_their_classes() -> None:
    for engine in ("auto", "litellm"):
        with raises(exceptions.ContextWindowExceededError, str(given.CONTEXT_LENGTH)):
            model(engine=engine)(given.TOO_LONG)
        with raises(exceptions.LMInvalidRequestError, "none"):
            model("none", engine=engine)(given.SUM)


keep()
