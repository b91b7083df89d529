"""LangChain, with an image: pip install langchain-openai."""

import os

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url = os.environ.get("NANO_INFERENCE_URL", "http://127.0.0.1:8000")
# A PNG file: a red circle at the top left, a blue square in the middle.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAADAAAAAwAgMAAAAqbBEUAAAACVBMVEX////QHicyR9pwi9jgAAAAVklEQVR42mNgQAGiDnAm"
    "C6PDfziHiYWBEcERYGCAq2NC1s7kwMAggF0GN+cAA8MH7DIfGBgOwDl/GBDOYWZ4zfOAgQLAyMDAwMC0goEhjASHDgRnuAEA"
    "3qUKo10UkVcAAAAASUVORK5CYII="
)

model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny-vision", temperature=0)
image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
message = HumanMessage([image, {"type": "text", "text": "What do you see?"}])
print("answer:", model.invoke([message]).content)

# LangChain's own form of an image.
image = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": PNG}
message = HumanMessage([image, {"type": "text", "text": "What do you see?"}])
print("stream:", "".join(chunk.content for chunk in model.stream([message])))
