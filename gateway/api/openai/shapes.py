"""What is kept of a call, to write its answer again."""

from __future__ import annotations

import msgspec

from ....bus.public import GenerateRequest
from ....text.messages import MessageFormat
from ...serving.measures import Measures
from ...serving.words import Words
from .answers import Answers
from .idempotency import Keyed
from .requests import Call, Prompt


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A call, as it stands on the bus.

    Attributes:
        tenant: Whose it is.
        call: Everything but its prompts.
        prompts: As they are submitted. Empty ones, where the answer does not show them and nobody
            will have to submit them again.
        texts: The prompts that came as texts, None for the others, and for all unless they are
            echoed.
        whole: Whether the prompts are there.
        keyed: What the call is known by, if it came with a key.
    """

    tenant: str
    call: Call
    prompts: list[Prompt]
    texts: list[str | None]
    whole: bool
    keyed: Keyed | None = None

    @property
    def model(self) -> str:
        """The model, or the adapter, that its requests are for."""
        return self.call.model

    @property
    def id(self) -> str:
        """The answer's."""
        return self.call.id

    @property
    def request_ids(self) -> list[str]:
        return [self.call.request_id(place, len(self.prompts)) for place in range(self.number)]

    @property
    def number(self) -> int:
        """Of prompts."""
        return len(self.prompts)

    def requests(self) -> list[GenerateRequest]:
        """What is submitted."""
        return [
            self.call.request(place, self.number, prompt, self.tenant)
            for place, prompt in enumerate(self.prompts)
        ]

    def answers(
        self,
        words: Words | None,
        form: MessageFormat | None = None,
        measures: Measures | None = None,
    ) -> Answers:
        """What writes the answer.

        Args:
            words: The tokenizer, where that takes it.
            form: How the model writes messages, where they are read.
            measures: What is told of messages.
        """
        return Answers(self.call, self.prompts, self.texts, words, form, measures)

    def encode(self) -> bytes:
        """As little as will do."""
        shape = self
        if not self.whole:
            nothing: list[Prompt] = [()] * self.number
            shape = msgspec.structs.replace(self, prompts=nothing)
        if not self.call.echo:
            shape = msgspec.structs.replace(shape, texts=[None] * self.number)
        # JSON, as it came: schemas may hold integers that MessagePack has no room for.
        return msgspec.json.encode(shape)


def decode_shape(record: bytes) -> Shape | None:
    """None of what another version has written and this one does not understand."""
    try:
        return msgspec.json.decode(record, type=Shape)
    except (ValueError, RecursionError):
        return None
