"""An image, through OpenAI's and Anthropic's libraries: pip install openai anthropic."""

import os

from anthropic import Anthropic
from openai import OpenAI

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
# A PNG file: a red circle at the top left, a blue square in the middle.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAADAAAAAwAgMAAAAqbBEUAAAACVBMVEX////QHicyR9pwi9jgAAAAVklEQVR42mNgQAGiDnAm"
    "C6PDfziHiYWBEcERYGCAq2NC1s7kwMAggF0GN+cAA8MH7DIfGBgOwDl/GBDOYWZ4zfOAgQLAyMDAwMC0goEhjASHDgRnuAEA"
    "3qUKo10UkVcAAAAASUVORK5CYII="
)
QUESTION = "What do you see?"

client = OpenAI(base_url=f"{url}/v1", api_key="none")
image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
answer = client.chat.completions.create(
    model="tiny-vision",
    messages=[{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}],
    temperature=0,
)
print("chat:", answer.choices[0].message.content)

part = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
text = {"type": "input_text", "text": QUESTION}
response = client.responses.create(
    model="tiny-vision", input=[{"role": "user", "content": [part, text]}], temperature=0
)
print("response:", response.output_text)

source = {"type": "base64", "media_type": "image/png", "data": PNG}
block = {"type": "image", "source": source}
message = Anthropic(base_url=url, api_key="none").messages.create(
    model="tiny-vision",
    max_tokens=40,
    messages=[{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}],
    extra_body={"temperature": 0},
)
print("message:", message.content[0].text)
