"""LiteLLM's proxy between OpenAI's client and the gateway: chats, responses and messages."""

from __future__ import annotations

import json
import sys

import httpx
from files import read_file, write_file
from litellm_server import LIMIT_S, running_proxy
from openai import OpenAI

TOOLS = {"write_file": write_file, "read_file": read_file}
PATH = {"type": "string"}
SCHEMAS = {
    "write_file": {"path": PATH, "content": {"type": "string"}},
    "read_file": {"path": PATH},
}


def schema_of(name: str) -> dict[str, object]:
    return {"type": "object", "properties": SCHEMAS[name], "required": [*SCHEMAS[name]]}


def chat(client: OpenAI, prompt: str) -> str:
    history: list[object] = [{"role": "user", "content": prompt}]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema_of(name)}}
        for name in TOOLS
    ]
    while True:
        answer = client.chat.completions.create(model="scripted", messages=history, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def respond(client: OpenAI, prompt: str) -> str:
    history: list[object] = [{"role": "user", "content": prompt}]
    tools = [
        {"type": "function", "name": name, "parameters": schema_of(name), "strict": False}
        for name in TOOLS
    ]
    while True:
        answer = client.responses.create(model="scripted", input=history, tools=tools)
        history += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
            history.append(output)


def message(proxy: str, prompt: str) -> str:
    history: list[object] = [{"role": "user", "content": prompt}]
    tools = [{"name": name, "input_schema": schema_of(name)} for name in TOOLS]
    while True:
        body = {"model": "scripted", "max_tokens": 999, "messages": history, "tools": tools}
        headers = {"x-api-key": "sk-1", "anthropic-version": "2023-06-01"}
        answer = httpx.post(f"{proxy}/v1/messages", json=body, headers=headers, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        parts = answer.json()["content"]
        history.append({"role": "assistant", "content": parts})
        calls = [part for part in parts if part["type"] == "tool_use"]
        if not calls:
            return "".join(part["text"] for part in parts if part["type"] == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": TOOLS[call["name"]](**call["input"]),
            }
            for call in calls
        ]
        history.append({"role": "user", "content": results})


def main(url: str, prompt: str) -> None:
    params = {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "none"}
    with running_proxy({"scripted": params}) as proxy:
        client = OpenAI(base_url=f"{proxy}/v1", api_key="sk-1", max_retries=0, timeout=LIMIT_S)
        print(chat(client, prompt))
        print(respond(client, prompt))
        print(message(proxy, prompt))


main(*sys.argv[1:3])
