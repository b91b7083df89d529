"""An agent of Strands, by OpenAI's interface."""

from __future__ import annotations

import sys

from files import read_file, write_file
from strands import Agent, tool
from strands.models.openai import OpenAIModel

url, prompt = sys.argv[1:3]
arguments = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
model = OpenAIModel(client_args=arguments, model_id="scripted")
print(Agent(model=model, tools=[tool(write_file), tool(read_file)])(prompt))
