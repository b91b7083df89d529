"""LangChain, with tools and answers of a schema: pip install langchain-openai."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"sky": "sunny", "degrees": 21}'


class Person(BaseModel):
    """Whom a text is about."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    job: Literal["chef", "pilot", "teacher"]


url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", temperature=0)

with_tools = model.bind_tools([get_weather])
messages = [HumanMessage("What is the weather in Oslo?")]
answer = with_tools.invoke(messages)
(call,) = answer.tool_calls
print("call:", call["name"], call["args"])
messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
print("answer:", with_tools.invoke(messages).content)

# One that has to be made, whatever is asked.
forced = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
print("required:", forced.invoke("Compute 5 - 0.").tool_calls[0]["name"])

text = "Write as JSON: Ben is a chef, 10 years old."
for method in ("json_schema", "function_calling"):
    person = model.with_structured_output(Person, method=method).invoke(text)
    print(f"{method}:", type(person).__name__, person.job in ("chef", "pilot", "teacher"))
