"""A trainer without our code: `peer.py ADDRESS WORLD_SIZE GROUP`.

It makes its group with the steps that slime (`init_process_group`) and SGLang
(`init_custom_process_group`) document for theirs, and broadcasts one tensor after the other, as
slime does. Commands come on standard input, and each is answered when it is done:

    send FILE   all tensors of a safetensors file, by name
    half FILE   the first half of them; then it does nothing more
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

LIMIT = timedelta(seconds=60)


def init_group(address: str, world_size: int, name: str) -> dist.ProcessGroup:
    """Rank 0 of a group beside the default one, which there need not be."""
    store, rank, size = next(rendezvous(f"tcp://{address}", 0, world_size, timeout=LIMIT))
    store.set_timeout(LIMIT)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=LIMIT,
    )
    _world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def train(address: str, world_size: str, name: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings would stand among the answers
    torch.set_num_threads(1)
    group = init_group(address, int(world_size), name)
    say("joined")
    for line in sys.stdin:
        command, file = line.split()
        tensors = sorted(load_file(file).items())
        if command == "half":
            tensors = tensors[: len(tensors) // 2]
        pending = [dist.broadcast(each, 0, group=group, async_op=True) for _, each in tensors]
        for work in pending:
            work.wait()
        say(command)


if __name__ == "__main__":
    train(*sys.argv[1:])
