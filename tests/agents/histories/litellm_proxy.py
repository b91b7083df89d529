"""Ten turns through LiteLLM's proxy: `python litellm_proxy.py URL messages|chat whole|streamed`.

`messages`: Anthropic's client, and the proxy calls `/v1/chat/completions`. `chat`: OpenAI's client,
and the proxy calls `/v1/messages`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic
from litellm_server import running_proxy
from openai import OpenAI

URL, API, MODE = sys.argv[1:]
DESCRIPTION = "How it is in a place"
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "array"}},
    "required": ["place"],
}


def messages(proxy: str) -> None:
    client = Anthropic(base_url=proxy, api_key="sk-1", max_retries=0)
    history: list[Any] = []
    tools: list[Any] = [{"name": "look", "description": DESCRIPTION, "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": "by-chat", "max_tokens": 500, "tools": tools}
    for turn in range(1, 11):
        history.append({"role": "user", "content": f"How is it in place {turn}?"})
        while True:
            if MODE == "whole":
                message = client.messages.create(messages=history, **asked)
            else:
                with client.messages.stream(messages=history, **asked) as stream:
                    message = stream.get_final_message()
            history.append({"role": "assistant", "content": message.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": f"cold in {block.input['place']}.",
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            history.append({"role": "user", "content": results})


def chat(proxy: str) -> None:
    client = OpenAI(base_url=f"{proxy}/v1", api_key="sk-1", max_retries=0)
    history: list[Any] = []
    function = {"name": "look", "description": DESCRIPTION, "parameters": SCHEMA}
    tools: list[Any] = [{"type": "function", "function": function}]
    asked: dict[str, Any] = {"model": "by-messages", "max_tokens": 500, "tools": tools}
    for turn in range(1, 11):
        history.append({"role": "user", "content": f"How is it in place {turn}?"})
        while True:
            if MODE == "whole":
                answer = client.chat.completions.create(messages=history, **asked)
            else:
                with client.chat.completions.stream(messages=history, **asked) as stream:
                    answer = stream.get_final_completion()
            message = answer.choices[0].message
            history.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                content = f"cold in {json.loads(call.function.arguments)['place']}."
                history.append({"role": "tool", "tool_call_id": call.id, "content": content})


def main() -> None:
    models = {
        "by-chat": {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none"},
        "by-messages": {"model": "anthropic/tiny", "api_base": URL, "api_key": "none"},
    }
    with running_proxy(models) as proxy:
        {"messages": messages, "chat": chat}[API](proxy)


main()
