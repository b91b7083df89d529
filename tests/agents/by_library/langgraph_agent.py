"""LangChain's agent, a graph of LangGraph, over chats and over responses."""

from __future__ import annotations

import sys

from files import read_file, write_file
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

url, prompt = sys.argv[1:3]
for over_responses in (False, True):
    model = ChatOpenAI(
        model="scripted",
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=over_responses,
    )
    agent = create_agent(model, tools=[write_file, read_file])
    asked = {"messages": [{"role": "user", "content": prompt}]}
    print(agent.invoke(asked)["messages"][-1].text)
    *_, (last, _) = agent.stream(asked, stream_mode="messages")
    print(last.text)
