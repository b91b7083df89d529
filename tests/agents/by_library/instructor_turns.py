"""Instructor: each turn's answer is a forced call of one tool."""

from __future__ import annotations

import sys
from typing import Any

import instructor
from files import read_file, write_file
from openai import OpenAI
from pydantic import BaseModel


class WriteFile(BaseModel):
    """Write a text into a file."""

    path: str
    content: str


class ReadFile(BaseModel):
    """Read a file's text."""

    path: str


class FinalAnswer(BaseModel):
    """Give the answer."""

    answer: str


def main(url: str, prompt: str) -> None:
    base = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(base, mode=instructor.Mode.TOOLS)
    history: list[Any] = [{"role": "user", "content": prompt}]

    def turn(kind: type[BaseModel]) -> tuple[Any, str]:
        made, answer = client.create_with_completion(
            model="scripted", response_model=kind, messages=history, max_retries=1
        )
        message = answer.choices[0].message
        history.append(message.model_dump())
        return made, message.tool_calls[0].id

    written, call = turn(WriteFile)
    result = write_file(written.path, written.content)
    history.append({"role": "tool", "tool_call_id": call, "content": result})
    asked, call = turn(ReadFile)
    result = read_file(asked.path)
    history.append({"role": "tool", "tool_call_id": call, "content": result})
    print(turn(FinalAnswer)[0].answer)


main(*sys.argv[1:3])
