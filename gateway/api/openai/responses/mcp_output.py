"""The items and events of a response of several rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .....bus.public import Completion
from .....text.messages import ToolCall
from .events import ResponseEvents
from .output import Answer, ItemEvent, OutputItems, ResponseWriter
from .tools import Origin


class Pending(NamedTuple):
    """A call that the model has written, or a person approved.

    Attributes:
        refusal: Why it is not made; None if it is.
    """

    label: str
    name: str
    arguments: str
    approval: str | None = None
    refusal: str | None = None


@dataclass
class RoundsOutput:
    """The output of all rounds so far.

    Attributes:
        blocks: The complete items.
        numbers: Numbers of items by kind.
        calls: Calls that the last round has written.
        labels: Labels of the servers.
    """

    labels: frozenset[str]
    blocks: list[Answer] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)
    calls: list[Pending] = field(default_factory=list)


class RoundItems(OutputItems):
    """The items of a round. Calls of MCP servers are put aside."""

    def share(self, output: RoundsOutput) -> None:
        """Continue the items of the rounds before."""
        self._all, self._first = output, len(output.blocks)
        self.blocks, self._number = output.blocks, output.numbers

    @property
    def is_empty(self) -> bool:
        return len(self.blocks) == self._first and not self._all.calls

    def called(self, call: ToolCall) -> list[ItemEvent]:
        origin = self._origins.get(call.name, Origin("function", call.name))
        if origin.namespace not in self._all.labels:
            return super().called(call)
        self._all.calls.append(Pending(origin.namespace or "", origin.name, call.arguments))
        return []


@dataclass(eq=False)
class RoundsWriter(ResponseWriter):
    """Writes a response of several rounds; `record` is that of the present round.

    Attributes:
        output: The output of all rounds.
        fields: Fields as the client knows them.
        usage: Usage of the rounds so far.
    """

    output: RoundsOutput
    fields: Answer
    usage: Answer = field(default_factory=dict)
    items: ClassVar[type[OutputItems]] = RoundItems

    def output_items(self) -> OutputItems:
        items = super().output_items()
        assert isinstance(items, RoundItems)
        self.output.calls.clear()
        items.share(self.output)
        return items

    def begun(self, status: Any) -> Answer:
        return super().begun(status) | self.fields | {"output": [*self.output.blocks]}

    def ended(self, completion: Completion, items: OutputItems | None = None) -> Answer:
        answer = super().ended(completion, items)
        self.usage = _sum(self.usage, answer["usage"])
        return answer | {"output": [*self.output.blocks], "usage": self.usage}


class RoundsEvents(ResponseEvents):
    """Sends the events of a response of several rounds."""

    def next_round(self) -> None:
        self._items, self._num_tokens = self.writer.output_items(), 0

    @property
    def items(self) -> OutputItems:
        return self._items

    async def item(self, kind: str, item: Answer, ahead: int = 0) -> None:
        """Send an event about an item that begins, or that has ended.

        Args:
            ahead: Items before it that have begun and not ended.
        """
        fields = {"output_index": len(self._items.blocks) + ahead, "item": item}
        await self._progress()
        await self._send_event(f"response.output_item.{kind}", fields)

    async def about(self, kind: str, item: Answer, ahead: int = 0, **fields: Any) -> None:
        """Send another event about an item."""
        place = {"item_id": item["id"], "output_index": len(self._items.blocks) + ahead}
        await self._send_event(f"response.{kind}", place | fields)


def _sum(one: Answer, other: Answer) -> Answer:
    """Return the sums of the numbers of two usages."""
    found = one | other
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict):
            found[name] = _sum(one[name], other[name])
        elif isinstance(one[name], int | float):
            found[name] = one[name] + other[name]
    return found
