"""A crew of one agent of CrewAI."""

from __future__ import annotations

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from files import read_file, write_file

url, prompt = sys.argv[1:3]
llm = LLM(model="openai/scripted", base_url=f"{url}/v1", api_key="none")
agent = Agent(
    role="writer",
    goal="do what is wished",
    backstory="You write files.",
    llm=llm,
    tools=[tool("write_file")(write_file), tool("read_file")(read_file)],
)
task = Task(description=prompt, expected_output="the file's text", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff().raw)
