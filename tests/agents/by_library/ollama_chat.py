"""Ollama's client, whole and as a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from files import read_file, write_file
from ollama import Client

TOOLS = {"write_file": write_file, "read_file": read_file}


def turn(client: Client, history: list[Any], *, stream: bool) -> tuple[str, list[Any]]:
    answer = client.chat("scripted", history, tools=[*TOOLS.values()], stream=stream)
    parts: Iterator[Any] = iter(answer) if stream else iter([answer])
    text, calls = "", []
    for part in parts:
        text += part.message.content or ""
        calls += part.message.tool_calls or []
    return text, calls


def main(url: str, prompt: str) -> None:
    client = Client(url)
    for stream in (False, True):
        history: list[Any] = [{"role": "user", "content": prompt}]
        calls: list[Any] = [None]
        while calls:
            text, calls = turn(client, history, stream=stream)
            history.append({"role": "assistant", "content": text, "tool_calls": calls})
            for call in calls:
                result = TOOLS[call.function.name](**call.function.arguments)
                name = call.function.name
                history.append({"role": "tool", "content": result, "tool_name": name})
        print(text)


main(*sys.argv[1:3])
