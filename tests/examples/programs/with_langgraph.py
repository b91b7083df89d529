"""LangGraph: an agent with a tool, on LangChain's client of OpenAI's interface."""

from __future__ import annotations

import asyncio

import given
import openai
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from person import Person
from promises import URL, cancels, keep, promise, raises

get_weather = tool(given.get_weather)


def chat(name: str = given.MODEL, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model=name, temperature=0, max_retries=0, **options
    )


def agent(model: ChatOpenAI):
    """The usual one: a model that may call tools until it answers."""
    bound = model.bind_tools([get_weather])

    async def ask(state: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "ask")
    return graph.compile(checkpointer=InMemorySaver())


def asked(text: str) -> dict[str, list[HumanMessage]]:
    return {"messages": [HumanMessage(text)]}


INTERFACES = ({}, {"use_responses_api": True})


@promise
async def tool_is_called_and_its_result_taken() -> None:
    for options in INTERFACES:
        given.cities.clear()
        config = {"configurable": {"thread_id": "a"}}
        graph = agent(chat(**options))
        state = await graph.ainvoke(asked(given.FORECAST), config)
        assert given.cities == ["Oslo"]
        assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][-1].text
        assert state["messages"][-1].usage_metadata["output_tokens"] > 0
        # The conversation goes on, with what is kept of it.
        state = await graph.ainvoke(asked(given.FORECAST), config)
        assert len(state["messages"]) > 5


@promise
async def stream_is_the_answer_in_parts() -> None:
    for options in INTERFACES:
        config = {"configurable": {"thread_id": "a"}}
        text = ""
        async for chunk, _ in agent(chat(**options)).astream(
            asked(given.SUM), config, stream_mode="messages"
        ):
            if isinstance(chunk, AIMessageChunk):
                text += chunk.text
        assert text == given.TOTAL


@promise
async def output_keeps_its_schema() -> None:
    for options in INTERFACES:
        for method in ("json_schema", "function_calling"):
            model = chat(**options).with_structured_output(Person, method=method)
            assert isinstance(await model.ainvoke(given.PERSON), Person)


@promise
async def errors_have_their_classes() -> None:
    for options in INTERFACES:
        config = {"configurable": {"thread_id": "a"}}
        with raises(openai.BadRequestError, "context_length_exceeded"):
            await agent(chat(**options)).ainvoke(asked(given.TOO_LONG), config)
        with raises(openai.NotFoundError, "model_not_found"):
            await agent(chat("none", **options)).ainvoke(asked(given.SUM), config)


@promise
async def cancelled_graph_cancels_its_request() -> None:
    config = {"configurable": {"thread_id": "a"}}
    model = chat(max_tokens=given.ENDLESS_TOKENS, extra_body={"ignore_eos": True}, n=32)
    with cancels(), raises(TimeoutError):
        async with asyncio.timeout(1):
            await agent(model).ainvoke(asked(given.SUM), config)


keep()
