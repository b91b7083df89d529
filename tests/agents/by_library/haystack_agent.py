"""An agent of Haystack."""

from __future__ import annotations

import sys

from files import read_file, write_file
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

url, prompt = sys.argv[1:3]
generator = OpenAIChatGenerator(
    model="scripted", api_base_url=f"{url}/v1", api_key=Secret.from_token("none"), max_retries=0
)
tools = [create_tool_from_function(each) for each in (write_file, read_file)]
agent = Agent(chat_generator=generator, tools=tools)
print(agent.run(messages=[ChatMessage.from_user(prompt)])["last_message"].text)
