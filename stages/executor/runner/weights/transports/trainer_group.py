"""The trainer's side of a torch.distributed group: rank 0, which broadcasts its weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from types import TracebackType

import torch
from torch import Tensor

from ......bus.weights import GroupWeights, TensorMeta
from ..storage import check_stored
from .background import Background
from .group import Member
from .layout import as_bytes, buckets, distinct, meta_of, sizes_of
from .rendezvous import CPU, host_and_port, open_group, open_store

BUCKET_BYTES = 64 << 20

_PARTING_S = 5.0
"""How long the end of a group may take, which is milliseconds unless torch hangs."""


class Sending:
    """A broadcast that is under way.

    Attributes:
        source: What `update_weights` must be told.
    """

    def __init__(self, source: GroupWeights, future: Future[None]) -> None:
        self.source = source
        self._future = future

    def result(self) -> None:
        """Waits until all is sent; the tensors may then change.

        Raises:
            WeightsError: An executor is gone, or did not take it in time.
        """
        self._future.result()


class WeightsGroup:
    """The trainer's side: rank 0 of a group that executors join.

    ```python
    with WeightsGroup("10.0.0.1:29600", world_size=2) as group:
        await client.join_weights_group("weights", group.address, world_size=2)
        sending = group.broadcast(model.state_dict())
        await client.update_weights(sending.source)
        sending.result()
    ```

    After an update that failed, make a new one: executors have left this one.

    Attributes:
        address: host:port where the others join.
    """

    def __init__(
        self,
        address: str,
        world_size: int,
        *,
        name: str = "weights",
        backend: str = "gloo",
        device: str | torch.device | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Opens the place where the others join, and waits for them in the background.

        Args:
            address: host:port to listen on; port 0 takes a free one.
            world_size: Members, this one included.
            name: Of the group; the executors join under the same name.
            backend: "gloo", or "nccl" where all have GPUs.
            device: Of NCCL's buffers; the current CUDA device when None.
            timeout_s: For the others to join, and for each sync.

        Raises:
            WeightsError: The address can't be listened on, or there is no such backend.
        """
        self._name = name
        self._timeout_s = timeout_s
        place = torch.device(device or "cuda") if backend == "nccl" else CPU
        deadline = time.monotonic() + timeout_s
        host, _ = host_and_port(address)
        store = open_store(address, world_size, True, deadline)
        self.address = f"{host}:{store.port}"
        self._stop = threading.Event()
        self._sent = 0
        self._thread = Background("weights-group")

        def join() -> Member:
            group = open_group(store, name, 0, world_size, backend, place, deadline)
            return Member(group, place, self._stop)

        self._member = self._thread.submit(join)

    def __enter__(self) -> WeightsGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def broadcast(
        self, state_dict: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> Sending:
        """Begins to send tensors, which must not change till it is done, and returns at once.

        Args:
            state_dict: Tensors by name, on any device. Of several names of one tensor, as tied
                parameters have, the first is sent.
            bucket_bytes: Tensors travel together up to so many bytes; 0 sends each by itself.

        Raises:
            WeightsError: The numbers of a tensor can't be read: it is sparse, quantised, on the
                meta device, or its storage was freed.
        """
        check_stored(state_dict)
        tensors = distinct(state_dict)
        metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        sizes = sizes_of(metas)
        plan = buckets(metas, sizes, bucket_bytes)
        source = GroupWeights(self._name, metas, bucket_bytes, self._sent)
        self._sent += len(plan)
        deadline = time.monotonic() + self._timeout_s

        def send() -> None:
            member = self._member.result()
            packed = _pack(tensors, metas, plan, member.device)
            member.broadcast(packed, deadline)

        return Sending(source, self._thread.submit(send))

    def close(self) -> None:
        """Leaves the group; what is still being sent fails."""
        self._stop.set()
        ended = self._thread.submit(lambda: self._member.result().let_go())
        self._thread.close()
        if self._member.done():
            wait([ended], _PARTING_S)


def _pack(
    tensors: Mapping[str, Tensor],
    metas: tuple[TensorMeta, ...],
    plan: list[list[int]],
    device: torch.device,
) -> Iterator[Tensor]:
    for bucket in plan:
        # Again, since the trainer may have freed some meanwhile.
        check_stored({metas[index].name: tensors[metas[index].name] for index in bucket})
        parts = [as_bytes(tensors[metas[index].name]).to(device) for index in bucket]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)
