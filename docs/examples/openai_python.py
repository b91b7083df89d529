"""OpenAI's library for Python: pip install openai."""

import json
import os
import time

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

# Several choices, of a sum that the model has half learnt. What the library has no argument for
# goes into extra_body.
several = client.completions.create(
    model="tiny",
    prompt="63 + 58 =",
    n=3,
    seed=1,
    temperature=1,
    max_tokens=8,
    extra_body={"top_k": 5, "return_token_ids": True},
)
for choice in several.choices:
    print("completion:", repr(choice.text), choice.token_ids)

response = client.responses.create(model="tiny", input="How much is 6 + 6?", temperature=0)
again = client.responses.retrieve(response.id)
print("response:", again.output_text)

# A batch: a file of calls, whose answers come as another file.
line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
line["body"] = {"model": "tiny", "messages": question, "temperature": 0}
file = client.files.create(file=("calls.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
for text in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(text)
    message = answer["response"]["body"]["choices"][0]["message"]
    print("batch:", batch.status, answer["custom_id"], message["content"])
