"""Ten turns with LiteLLM: `python litellm_client.py URL MODEL whole|streamed`.

`openai/tiny` speaks to `/v1/chat/completions`, `anthropic/tiny` to `/v1/messages`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

URL, MODEL, MODE = sys.argv[1:]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "How it is in a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "array"}},
            "required": ["place"],
        },
    },
}


def answer(messages: list[Any]) -> Any:
    base = URL if MODEL.startswith("anthropic/") else f"{URL}/v1"
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "tools": [TOOL],
        "api_base": base,
        "api_key": "none",
        "max_tokens": 500,
        "num_retries": 0,
        "stream": MODE == "streamed",
    }
    found = litellm.completion(**asked)
    if MODE == "streamed":
        found = litellm.stream_chunk_builder(list(found), messages=messages)
    return found.choices[0].message


def main() -> None:
    messages: list[Any] = []
    for turn in range(1, 11):
        messages.append({"role": "user", "content": f"How is it in place {turn}?"})
        while True:
            message = answer(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                place = json.loads(call.function.arguments)["place"]
                content = f"cold in {place}."
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


main()
