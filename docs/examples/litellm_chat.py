"""LiteLLM: pip install litellm."""

import json
import os
import time

# The prices of models are not asked for.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
question = [{"role": "user", "content": "How much is 6 + 6?"}]
# By OpenAI's interface. What LiteLLM has no argument for goes into extra_body.
asked = {
    "model": "openai/tiny",
    "api_base": f"{url}/v1",
    "api_key": "none",
    "messages": question,
    "temperature": 0,
    "extra_body": {"cache_salt": "an example"},
}

answer = litellm.completion(**asked)
print("chat:", answer.choices[0].message.content, answer.usage.total_tokens)

text = ""
for chunk in litellm.completion(stream=True, stream_options={"include_usage": True}, **asked):
    for choice in chunk.choices:
        text += choice.delta.content or ""
print("stream:", text)

# By Anthropic's.
message = litellm.completion(
    model="anthropic/tiny",
    api_base=url,
    api_key="none",
    messages=question,
    max_tokens=100,
    temperature=0,
)
print("message:", message.choices[0].message.content, message.choices[0].finish_reason)

# A batch: a file of calls, whose answers come as another file.
server = {"custom_llm_provider": "openai", "api_base": f"{url}/v1", "api_key": "none"}
line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
line["body"] = {"model": "tiny", "messages": question, "temperature": 0}
file = ("calls.jsonl", json.dumps(line).encode())
uploaded = litellm.create_file(file=file, purpose="batch", **server)
batch = litellm.create_batch(
    input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", **server
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = litellm.retrieve_batch(batch_id=batch.id, **server)
found = json.loads(litellm.file_content(file_id=batch.output_file_id, **server).content)
message = found["response"]["body"]["choices"][0]["message"]
print("batch:", batch.status, found["custom_id"], message["content"])
