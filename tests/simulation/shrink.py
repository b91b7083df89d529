"""A failing story made short, and printed as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from .story import Fault, Request, Story
from .world import World

T = TypeVar("T")

replace = msgspec.structs.replace

_PLAIN: dict[str, Any] = {
    "shuffled": False,
    "lanes": 1,
    "noise": 0,
    "roles": (),
    "host_slots": 0,
    "disk_blocks": 0,
    "drafts": 0,
    "snapshots": -1,
    "slowness": 1,
}


def violations_of(story: Story) -> list[str]:
    """Return what is wrong with a story; [] if nothing is."""
    world = World(story)
    world.run()
    return world.violations


def kind_of(violation: str) -> str:
    """Return the words of a violation, which are the same for other names and numbers."""
    return re.sub(r"[a-z]*\d[\w.-]*|[,:{}()\[\]]", "", violation.partition(" is ")[0])


def shrink(
    story: Story, fails: Callable[[Story], bool] | None = None, most_runs: int = 400
) -> Story:
    """Return a shorter story that fails, too: fewer faults and requests, each as plain as can be.

    Args:
        story: It fails.
        fails: Whether a story fails; by default in the same way.
        most_runs: Stories to try.
    """
    if fails is None:
        kind = kind_of(violations_of(story)[0])

        def fails(story: Story) -> bool:
            return any(kind_of(each) == kind for each in violations_of(story)[:1])

    runs = 0
    while True:
        for shorter in _shorter(story):
            runs += 1
            if runs > most_runs:
                return story
            if fails(shorter):
                story = shorter
                break
        else:
            return story


def _shorter(story: Story) -> Iterator[Story]:
    """Return stories with a little less, those with much less first."""
    for faults in _fewer(story.faults):
        yield replace(story, faults=tuple(faults))
    for requests in _fewer(story.requests):
        yield replace(story, requests=tuple(requests))
    for name, value in _PLAIN.items():
        if getattr(story, name) != value:
            yield replace(story, **{name: value})
    if story.clients > 1 and not any(fault.target.startswith("client") for fault in story.faults):
        requests = [replace(request, client=0) for request in story.requests]
        yield replace(story, clients=1, requests=tuple(requests))
    if story.gateways and all(each.interface == "bus" for each in story.requests):
        faults = [each for each in story.faults if not each.target.startswith("gateway")]
        yield replace(story, gateways=0, faults=tuple(faults))
    if story.adapters and not any(fault.kind == "adapter" for fault in story.faults):
        requests = [replace(request, adapter="") for request in story.requests]
        yield replace(story, adapters=(), requests=tuple(requests))
    if story.replicas > 1 and not any("." in fault.target for fault in story.faults):
        yield replace(story, replicas=1, roles=())
    for index, request in enumerate(story.requests):
        for plainer in _plainer(request):
            requests = [*story.requests]
            requests[index] = plainer
            yield replace(story, requests=tuple(requests))


def _fewer(items: Sequence[T]) -> Iterator[list[T]]:
    """Return the items without a half, without a quarter, and so on, without one."""
    size = len(items)
    while size > 0:
        for start in range(0, len(items), size):
            yield [*items[:start], *items[start + size :]]
        size //= 2


def _plainer(request: Request) -> Iterator[Request]:
    defaults = {
        "n": 1,
        "budget_ms": 0,
        "leave_ms": 0,
        "priority": 0,
        "stop_ids": (),
        "adapter": "",
        "min_tokens": 0,
        "twice": False,
        "constraint": "",
        "drop_ms": 0,
    }
    for name, value in defaults.items():
        if getattr(request, name) != value:
            yield replace(request, **{name: value})
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[: len(request.prompt) // 2])
    if request.max_tokens > 1:
        yield replace(request, max_tokens=request.max_tokens // 2)


def table_of(story: Story) -> list[tuple[str, str, str]]:
    """Return the rows of a story: time in milliseconds, what, and details."""
    rows = [(request.at_ms, *_told_request(request)) for request in story.requests]
    rows += [(fault.at_ms, *_told_fault(fault)) for fault in story.faults]
    rows.sort(key=lambda row: row[0])
    return [(str(at_ms), what, details) for at_ms, what, details in rows]


def settings_of(story: Story) -> str:
    """Return the story's settings in one line."""
    raw = msgspec.to_builtins(replace(story, requests=(), faults=()))
    return ", ".join(f"{name} {value}" for name, value in raw.items())


def _told_request(request: Request) -> tuple[str, str]:
    raw = msgspec.to_builtins(request)
    details = [f"prompt of {len(request.prompt)}"]
    for name in ("name", "at_ms", "prompt"):
        raw.pop(name, None)
    details += [f"{name} {value}" for name, value in raw.items()]
    return f"request {request.name}", ", ".join(details)


def _told_fault(fault: Fault) -> tuple[str, str]:
    raw = msgspec.to_builtins(fault)
    details = [f"{raw.pop('target')}"] if fault.target else []
    for name in ("at_ms", "kind"):
        raw.pop(name, None)
    details += [f"{name} {value}" for name, value in raw.items()]
    return fault.kind, ", ".join(details)
