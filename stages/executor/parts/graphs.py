"""Decode steps recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ..runner.attention.paged import PagedBackend
from ..runner.graphs import Capture, CudaCapture, DecodeGraphs
from ..runner.memory import no_memory
from . import ExecutorState, Part


class Graphs(Part):
    """Records the decode steps, and records them again when their tensors move."""

    def __init__(self, state: ExecutorState, capture: Capture) -> None:
        """Record the decode steps, which takes a PagedBackend.

        Raises:
            RuntimeError: The model's step can't be recorded.
        """
        super().__init__(state)
        self._capture = capture
        self._record()

    def _record(self) -> None:
        state = self.state
        backend = state.runner.backend
        assert isinstance(backend, PagedBackend)
        try:
            with state.runner.active():
                state.steps.graphs = DecodeGraphs(
                    state.model,
                    backend,
                    state.runner.cache,
                    state.feed,
                    self._capture,
                    state.config.max_batch_size,
                )
        except RuntimeError as error:
            state.off["graphs"] = f"the model's step can't be recorded: {error}"
            raise
        state.off.pop("graphs", None)
        if why := state.steps.graphs.without_limits:
            state.off["graphs"] = f"recorded, but for choices within limits: {why}"

    def enlarged(self) -> None:
        self._record()

    def released(self) -> None:
        # Graphs hold memory of their own, and addresses of released tensors.
        self.state.steps.graphs, self.state.off["graphs"] = None, "memory is released"

    def resumed(self) -> None:
        if self.state.steps.graphs is None:
            try:
                self._record()
            except RuntimeError as error:
                raise no_memory(error) from None


def record_at_load(state: ExecutorState) -> Iterator[Graphs]:
    """Make the part; nothing if the model's step can't be recorded."""
    with suppress(RuntimeError):
        yield Graphs(state, CudaCapture(state.model.device))
