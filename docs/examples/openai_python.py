"""OpenAI's library for Python: pip install openai."""

import os

from openai import OpenAI

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key="none")
question = [{"role": "user", "content": "How much is 6 + 6?"}]

answer = client.chat.completions.create(model="tiny", messages=question, temperature=0)
print("chat:", answer.choices[0].message.content, answer.usage.total_tokens)

# A stream; the last chunk has the usage, and no choices.
stream = client.chat.completions.create(
    model="tiny",
    messages=question,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
print("stream:", end=" ")
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="")
print()

# Several choices. What the library has no argument for goes into extra_body.
several = client.completions.create(
    model="tiny",
    prompt="98 + 25 =",
    n=3,
    seed=1,
    max_tokens=8,
    extra_body={"top_k": 5, "return_token_ids": True},
)
for choice in several.choices:
    print("completion:", repr(choice.text), choice.token_ids)

response = client.responses.create(model="tiny", input="How much is 6 + 6?", temperature=0)
again = client.responses.retrieve(response.id)
print("response:", again.output_text)
