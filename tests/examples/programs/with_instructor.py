"""Instructor, by each way that it has to get an answer of a schema."""

from __future__ import annotations

import asyncio
from typing import Any

import given
import instructor
import openai
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from person import Person
from promises import URL, cancels, keep, promise, raises
from pydantic import BaseModel, Field

MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


class Numbers(BaseModel):
    """An answer that is never complete."""

    numbers: list[int] = Field(min_length=1000)


def client(mode: Mode) -> instructor.Instructor:
    made = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(made, mode=mode)


def asked(text: str = given.PERSON, model: str = given.MODEL) -> dict[str, Any]:
    """Nothing is tried again: each answer has to keep its schema."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_retries": 0, "response_model": Person}


@promise
def answer_keeps_its_schema() -> None:
    for mode in MODES:
        person, answer = client(mode).chat.completions.create_with_completion(**asked())
        assert isinstance(person, Person), mode
        assert answer.usage.total_tokens > 0


@promise
def streamed_parts_become_the_answer() -> None:
    for mode in MODES:
        *parts, last = client(mode).chat.completions.create_partial(**asked())
        Person.model_validate(last.model_dump())
        # A call of a tool comes when it is complete.
        assert parts or mode is not Mode.JSON_SCHEMA


@promise
def errors_have_their_class_and_cause() -> None:
    for mode in MODES:
        for text, model, kind in (
            (given.TOO_LONG, given.MODEL, openai.BadRequestError),
            (given.PERSON, "none", openai.NotFoundError),
        ):
            with raises(InstructorRetryException):
                try:
                    client(mode).chat.completions.create(**asked(text, model))
                except InstructorRetryException as error:
                    assert isinstance(error.__cause__, kind), error.__cause__  # noqa: PT017
                    raise


@promise
async def cancelled_call_cancels_its_request() -> None:
    impatient = instructor.from_openai(AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
    with cancels(), raises(TimeoutError):
        async with asyncio.timeout(1):
            await impatient.chat.completions.create(
                **asked() | {"response_model": Numbers}, max_tokens=given.ENDLESS_TOKENS
            )


keep()
