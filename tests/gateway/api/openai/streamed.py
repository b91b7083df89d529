"""The events of streams as they come over the wire, and what a client puts together of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx


class Event(NamedTuple):
    """One of a stream. `data` is a chunk, an error, or None for the end."""

    event_id: str
    data: dict[str, Any] | None


def stream_of(answer: httpx.Response) -> list[Event]:
    """The events of a stream that ended as one does, the end among them."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    found = [event_of(part) for part in parts if not part.startswith(":")]
    assert found[-1].data is None
    assert all(event.data is not None for event in found[:-1])
    return found


def event_of(part: str) -> Event:
    named, data = part.split("\n")
    assert (named[:4], data[:6]) == ("id: ", "data: ")
    return Event(named[4:], None if data == "data: [DONE]" else json.loads(data[6:]))


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as one does."""
    return [event.data for event in stream_of(answer) if event.data is not None]


def response_events(answer: httpx.Response, first: int = 0) -> list[dict[str, Any]]:
    """Those of a stream of a response, numbered without a gap from the given number on."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, end = answer.text.split("\n\n")
    assert end == ""
    return [
        response_event(part, number)
        for number, part in enumerate((each for each in parts if each[0] != ":"), first)
    ]


def response_event(part: str, number: int | None = None) -> dict[str, Any]:
    """The data of one; its name is its type, and its id ends with its number, if it has one."""
    name, *ids, data = part.split("\n")
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert found["type"] == name.removeprefix("event: ")
    assert all(each.endswith(f".{found['sequence_number']}") for each in ids)
    assert number in (None, found["sequence_number"])
    return found


def choices(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Those of one index, in order."""
    return [each for one in chunks for each in one["choices"] if each["index"] == index]


class Recorded:
    """A client's result of some events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usages: list[Any] = []
        self.prompts: list[Any] = []
        for event in events:
            if event.data is None:
                continue
            self.prompts += values(event.data, "prompt_token_ids")
            if not event.data["choices"]:
                self.usages.append(event.data["usage"])
            for choice in event.data["choices"]:
                self._take(choice)

    def _take(self, choice: dict[str, Any]) -> None:
        names = ("roles", "texts", "tokens", "logprobs", "versions", "reasons", "prompts")
        found = self.choices.setdefault(choice["index"], {name: [] for name in names})
        delta = choice.get("delta", {})
        found["roles"] += values(delta, "role")
        found["texts"] = [
            "".join([*found["texts"], choice.get("text") or delta.get("content", "")])
        ]
        found["tokens"] += choice.get("token_ids", [])
        found["prompts"] += values(choice, "prompt_token_ids")
        logprobs = choice["logprobs"] or {}
        found["logprobs"] += logprobs.get("content") or []
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found["logprobs"] += zip(*(logprobs.get(each, []) for each in columns), strict=True)
        for span in choice.get("weight_versions", []):
            found["versions"] += [(span["version"], i) for i in range(span["start"], span["end"])]
        found["reasons"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)


def values(found: dict[str, Any], name: str) -> list[Any]:
    return [found[name]] if name in found else []
