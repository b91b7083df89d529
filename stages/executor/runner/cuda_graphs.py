"""Recording on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .graphs import Step

_WARM_UPS = 2


class CudaCapture:
    """Records steps as CUDA graphs that share one pool of memory.

    So they must be replayed one after the other, and what one gives is to be read, on the same
    stream, before another is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, step: Step) -> Step:
        """Records one step.

        Raises:
            RuntimeError: Something in it can't be recorded, such as a wait for the device.
        """
        with torch.cuda.device(self._device), _same_stream_after():
            # What is only made at the first call (Triton's kernels, the libraries' workspaces)
            # can't be recorded.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.synchronize()
            if not self._graphs:
                # A pool ends with the last of its graphs, and can't be taken again.
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = step()
            torch.cuda.synchronize()
            self._graphs.add(graph)

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outputs

        return replay


@contextmanager
def _same_stream_after() -> Iterator[None]:
    """Goes back to the current stream; a recording that fails leaves its own behind."""
    before = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(before)
