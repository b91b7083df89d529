"""Images in questions of commands."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import ConfigError

Message = dict[str, Any]

_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""Image types by how their files begin."""


def read_image(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        ConfigError: It can't be read, or is no image.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; give a readable file") from None
    if not data.startswith(tuple(_TYPES)):
        raise ConfigError(f"{path} is no PNG, JPEG, WebP or GIF; give an image")
    return data


def question(text: str, images: Sequence[bytes]) -> Message:
    """Return a user's message: the images, and the text about them."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "data": data} for data in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def for_bus(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the fields of a GenerateRequest for messages of `question` and others."""
    images: list[dict[str, bytes]] = []
    found: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [{"data": part["data"]} for part in content if part["type"] == "image"]
            parts = [{"type": "image"} if "data" in part else part for part in content]
            message = message | {"content": parts}
        found.append(message)
    return {"messages": found} | ({"images": images} if images else {})


def for_server(message: Message) -> Message:
    """Return a message of `question` in OpenAI's form."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [_part_for_server(part) for part in content]}


def from_server(message: Message) -> Message:
    """Return a message of `for_server` in the form of `question`.

    Raises:
        ConfigError: An image is no data URL.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [_part_from_server(part) for part in content]}


def _part_from_server(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image_url":
        return part
    try:
        head, _, data = part["image_url"]["url"].partition(";base64,")
        if not head.startswith("data:image/"):
            raise ValueError(head)
        return {"type": "image", "data": base64.b64decode(data, validate=True)}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError("an image of the conversation is no data URL; add it anew") from None


def _part_for_server(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    data: bytes = part["data"]
    kind = next(kind for head, kind in _TYPES.items() if data.startswith(head))
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}
