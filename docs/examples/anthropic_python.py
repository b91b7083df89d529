"""Anthropic's library for Python: pip install anthropic."""

import os
import time

from anthropic import Anthropic

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=url, api_key="none")
question = [{"role": "user", "content": "How much is 6 + 6?"}]

print("count:", client.messages.count_tokens(model="tiny", messages=question).input_tokens)

# Newer versions of the library have no argument for how to sample.
greedy = {"temperature": 0}
message = client.messages.create(model="tiny", max_tokens=100, messages=question, extra_body=greedy)
print("message:", message.content[0].text, message.stop_reason)

with client.messages.stream(
    model="tiny", max_tokens=100, messages=question, extra_body=greedy
) as stream:
    print("stream:", "".join(stream.text_stream))

# What the assistant has begun is continued.
begun = [*question, {"role": "assistant", "content": "1"}]
rest = client.messages.create(model="tiny", max_tokens=100, messages=begun, extra_body=greedy)
print("rest:", rest.content[0].text)

# A batch of messages.
request = {"model": "tiny", "max_tokens": 100, "messages": question}
batch = client.messages.batches.create(
    requests=[{"custom_id": each, "params": {**request, **greedy}} for each in ("a", "b")]
)
while batch.processing_status != "ended":
    time.sleep(0.5)
    batch = client.messages.batches.retrieve(batch.id)
for each in client.messages.batches.results(batch.id):
    print("batch:", each.custom_id, each.result.type, each.result.message.content[0].text)
