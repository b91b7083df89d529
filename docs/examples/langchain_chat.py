"""LangChain: pip install langchain-openai."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
# What ChatOpenAI has no argument for goes into extra_body.
model = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key="none",
    model="tiny",
    temperature=0,
    extra_body={"cache_salt": "an example"},
)
prompt = ChatPromptTemplate.from_messages([("user", "How much is {left} + {right}?")])
chain = prompt | model | StrOutputParser()

print("chain:", chain.invoke({"left": 6, "right": 6}))
print("stream:", "".join(chain.stream({"left": 6, "right": 6})))
print("batch:", chain.batch([{"left": 6, "right": 6}, {"left": 2, "right": 3}]))

answer = model.invoke("How much is 6 + 6?")
print("usage:", answer.usage_metadata["total_tokens"], answer.response_metadata["finish_reason"])

responses = ChatOpenAI(
    base_url=f"{url}/v1", api_key="none", model="tiny", temperature=0, use_responses_api=True
)
print("response:", responses.invoke("How much is 6 + 6?").text)
