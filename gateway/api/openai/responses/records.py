"""What is kept of a response, to tell of it and to go on with it."""

from __future__ import annotations

from typing import Any

import msgspec

from .....bus.public import GenerateRequest
from .....config import Config, Constraint, NanoInferenceError
from .....text.messages import Reading
from ....policy.caller import ANYBODY, Caller
from ....server.http import EngineError
from ..idempotency import Keyed
from .items import Item
from .requests import ResponseCall


class NeverBegun(EngineError):
    """Nothing will come of a response that was kept: none of it was submitted."""


class Failure(msgspec.Struct, frozen=True):
    """Why that is so."""

    code: str
    message: str

    def error(self) -> NeverBegun:
        """As it is raised."""
        return NeverBegun(self.message, code=self.code)


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="response"):
    """A response, as it stands on the bus.

    Attributes:
        tenant: Whose it is.
        call: Everything but its input.
        items: The conversation before its output, instructions aside.
        prompt: The tokens that are submitted; none, where nobody will have to submit them again.
        deadline_ns: When its time is over, on the clock of `now_ns`; None when it has no limit.
        caller: Who called, and what he may.
        keyed: What the call is known by, if it came with a key.
        failure: Why nothing will come of it, where nothing was submitted.
        reading: What it takes to read its output; None where all of that is text.
        constraint: What the output has to be, where that is more than its fields say.
    """

    tenant: str
    call: ResponseCall
    items: list[Item]
    prompt: tuple[int, ...]
    deadline_ns: int | None = None
    caller: Caller = ANYBODY
    keyed: Keyed | None = None
    failure: Failure | None = None
    reading: Reading | None = None
    constraint: Constraint | None = None

    @property
    def model(self) -> str:
        """The model, or the adapter, that its requests are for."""
        return self.call.model

    @property
    def id(self) -> str:
        """The response's, and its request's."""
        return self.call.id

    @property
    def number(self) -> int:
        """Of its requests."""
        return 1

    @property
    def background(self) -> bool:
        """Whether it goes on without its client."""
        return self.call.fields.background

    @property
    def whole(self) -> bool:
        """Whether others may have to submit it."""
        return self.background or self.keyed is not None

    @property
    def kept(self) -> bool:
        """Whether anything of it is."""
        return self.call.fields.store or self.keyed is not None

    @property
    def name(self) -> str:
        """What it has claimed, "" for nothing."""
        return self.keyed.name if self.keyed else ""

    def request(self, config: Config) -> GenerateRequest:
        """What is submitted."""
        request = self.call.request(self.prompt, self.tenant, config)
        if self.constraint is None:
            return request
        sampling = msgspec.structs.replace(request.sampling, constraint=self.constraint)
        return msgspec.structs.replace(request, sampling=sampling)

    def failed(self, error: NanoInferenceError) -> Record:
        """The same, of which nothing will come."""
        changes: dict[str, Any] = {"failure": Failure(error.code, error.message)}
        return msgspec.structs.replace(self, prompt=(), constraint=None, **changes)

    def encode(self) -> bytes:
        """As little as will do."""
        # Of what nobody will have to submit again, neither is looked at.
        record = self if self.whole else msgspec.structs.replace(self, prompt=(), constraint=None)
        # JSON, as it came: schemas may hold integers that MessagePack has no room for.
        return msgspec.json.encode(record)


def decode_record(raw: bytes) -> Record | None:
    """None of what is none, or was written by another version and is not understood."""
    try:
        return msgspec.json.decode(raw, type=Record)
    except (ValueError, RecursionError):
        return None
