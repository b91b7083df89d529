"""Models that do little, and remember how they were called."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import numpy as np

from nano_inference.config import NanoInferenceError
from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.kserve.tensors import DATATYPES, ModelSpec, NamedTensor, TensorSpec

LIMIT_S = 20
"""Longest that anybody waits for what is to happen."""


class FakeModel:
    """A model that waits until it is told, or does what one of those below does.

    Attributes:
        spec: What it takes and gives.
        calls: All that have come.
        ended: How each ended that has ended: "done", "cancelled" or "failed".
        why_not: Its trouble.
        failure: What asking for its trouble raises.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.calls: list[ModelCall] = []
        self.ended: list[str] = []
        self.why_not = ""
        self.failure: NanoInferenceError | None = None
        self._changed = anyio.Event()

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        self.calls.append(call)
        self._tell()
        end = "cancelled"
        try:
            await self.answer_all(call, answer)
            end = "done"
        except Exception:
            end = "failed"
            raise
        finally:
            self.ended.append(end)
            self._tell()

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        """What the model does. This one never answers."""
        await anyio.sleep_forever()

    async def trouble(self) -> str:
        if self.failure is not None:
            raise self.failure
        return self.why_not

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until calls have come or ended so that this holds."""
        with anyio.fail_after(LIMIT_S):
            while not holds():
                self._changed = anyio.Event()
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()


class Echo(FakeModel):
    """Gives back each of its inputs as the output of that name: one of each datatype."""

    def __init__(self, name: str = "echo", shape: tuple[int, ...] = (-1,)) -> None:
        tensors = tuple(TensorSpec(each, each, shape, optional=True) for each in DATATYPES)
        outputs = tuple(TensorSpec(each, each, shape) for each in DATATYPES)
        super().__init__(ModelSpec(name=name, inputs=tensors, outputs=outputs, versions=("1", "3")))

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        await answer(call.request.inputs)


class Slow(FakeModel):
    """Never answers."""

    def __init__(self, name: str = "slow") -> None:
        super().__init__(ModelSpec(name=name, inputs=(), outputs=()))


class Failing(FakeModel):
    """Fails, after some answers where there may be several."""

    def __init__(
        self, error: NanoInferenceError, *, answers: int = 0, name: str = "failing"
    ) -> None:
        outputs = (TensorSpec("number", "INT64", (1,)),)
        super().__init__(ModelSpec(name=name, inputs=(), outputs=outputs, decoupled=answers > 0))
        self._error = error
        self._answers = answers

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        for number in range(self._answers if call.many else 0):
            await answer(numbered(number))
        raise self._error


class Several(FakeModel):
    """Answers as often as its input `times` says; once, with the last, where there is one answer.

    Attributes:
        go_on: Until it is set, nothing comes behind the first answer.
    """

    def __init__(self, name: str = "several") -> None:
        inputs = (TensorSpec("times", "INT32", (1,)), TensorSpec("text", "BYTES", (1,), True))
        outputs = (TensorSpec("number", "INT64", (1,)), TensorSpec("word", "BYTES", (1,)))
        super().__init__(ModelSpec(name=name, inputs=inputs, outputs=outputs, decoupled=True))
        self.go_on = anyio.Event()
        self.go_on.set()

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        times = call.request.input("times")
        assert times is not None
        numbers = range(int(times[0]))
        for number in numbers if call.many else numbers[-1:]:
            if call.many and number:
                await self.go_on.wait()
            await answer(numbered(number))


def numbered(number: int) -> list[NamedTensor]:
    """An answer of `Several`, or of `Failing`."""
    word = np.array([b"number %d" % number], dtype=np.object_)
    return [
        NamedTensor("number", np.array([number], dtype=np.int64)),
        NamedTensor("word", word),
    ]
