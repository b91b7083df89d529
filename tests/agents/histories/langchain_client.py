"""Ten turns with LangChain: `python langchain_client.py URL chat|responses whole|streamed`."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, API, MODE = sys.argv[1:]


@tool
def look(place: str, days: list[Any] | None = None) -> str:
    """How it is in a place"""
    return f"cold in {place}."


def main() -> None:
    options: dict[str, Any] = {}
    if API == "responses":
        # Without them it drops reasoning.
        options = {"store": False, "include": ["reasoning.encrypted_content"]}
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{URL}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=API == "responses",
        **options,
    ).bind_tools([look])
    messages: list[BaseMessage] = []
    for turn in range(1, 11):
        messages.append(HumanMessage(f"How is it in place {turn}?"))
        while True:
            if MODE == "whole":
                answer = model.invoke(messages)
            else:
                chunks = list(model.stream(messages))
                answer = chunks[0]
                for chunk in chunks[1:]:
                    answer += chunk
            messages.append(answer)
            if not answer.tool_calls:
                break
            messages += [
                ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])
                for call in answer.tool_calls
            ]


main()
