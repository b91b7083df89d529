"""The program of every rank but rank 0: a model runner that runs rank 0's commands in order.

`worker DESCRIPTOR` waits at a connection to rank 0's process, and forks a rank whenever it receives
its number, with the descriptors of the rank's own connections, for commands and calls, and of its
groups' memory (`groups.join_groups`). A rank ends with its connection.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import torch

from ....config import EngineConfig, ModelError
from .comparison import compare_shards
from .interface import ModelRunner, make_runner
from .kv_cache import with_kv_dtype
from .leader import receive_adapter
from .loaded_model import LoadedModel
from .memory import ReplicaMemory
from .model import prepare_loading
from .rank_weights import RankReceiver, write_everywhere
from .ranks import commands as do
from .ranks.groups import MOST_DESCRIPTORS, RankGroups, join_groups
from .ranks.processes import LOAD_TIMEOUT_S
from .ranks.rank_error import RankError
from .ranks.shared_memory import SharedMemoryGroup
from .sharded_model import load_sharded, move_experts
from .shards import ShardedWeights
from .weights.sync_manager import WeightSyncManager


class Worker:
    """One rank's model runner."""

    def __init__(
        self, group: SharedMemoryGroup, memories: Sequence[int], calls: Connection
    ) -> None:
        self._group = group
        self._memories = memories
        self._calls = calls
        self._groups: RankGroups | None = None
        self._model: LoadedModel
        self._runner: ModelRunner
        self._weights: WeightSyncManager
        self._receiver: RankReceiver
        self._memory: ReplicaMemory
        self._config: EngineConfig

    def run(self, command: do.AnyCommand) -> None:
        """Run a command.

        Raises:
            ModelError: It can't be done.
            RankError: Another rank has failed.
        """
        match command:
            case do.Load():
                self._load(command)
            case do.Prepare():
                self._runner = runner = make_runner(self._config, self._model, command.num_blocks)
                huge = self._config.huge_pages == "auto"
                self._memory = ReplicaMemory([runner.cache], self._weights, huge_pages=huge)
                if self._groups is not None:
                    self._groups.set_timeout(self._config.rank_timeout_s)
            case do.Forward():
                self._forward(command)
            case do.CopyBlocks():
                self._runner.cache.copy_blocks(command.pairs)
            case do.ClearCache():
                self._runner.cache.clear()
            case do.Release():
                self._memory.begin_release(command.tags)
                self._memory.release(command.tags)
            case do.Resume():
                self._memory.resume(command.tags)
            case do.NewWeights(held):
                write_everywhere(self._shards, self._group.broadcast, None)
                self._receiver.write(held)
            case do.MoveExperts():
                move_experts(self._model.module, command.owners)
            case do.StageAdapter():
                dtype = self._model.dtypes.activations
                adapter = receive_adapter(command, self._group.broadcast, dtype)
                self._runner.adapters.stage(adapter)
            case do.UnstageAdapter(id, version):
                self._runner.adapters.unstage(id, version)
            case do.SwitchAdapter(id, version):
                self._runner.adapters.switch(id, version)
            case do.Report():
                pass

    def report(self) -> do.Reply:
        """Return this rank's report; see `ModelRunner.report`."""
        return self._runner.report()

    def fail(self, reason: str) -> None:
        """Let the operations of ranks that wait for this one raise `RankError`."""
        self._group.fail(reason)
        if self._groups is not None:
            self._groups.fail(reason)

    @property
    def _shards(self) -> ShardedWeights:
        assert self._model.shards is not None
        return self._model.shards

    def _forward(self, command: do.Forward) -> None:
        runner = self._runner
        inputs = runner.builder.build(command.rows, command.input_ids, command.logits_index)
        if command.adapters is not None:
            step = runner.adapters.step(command.adapters)
            inputs = msgspec.structs.replace(inputs, adapters=step)
        with runner.active():
            runner.start(inputs, with_states=command.with_states)

    def _load(self, command: do.Load) -> None:
        torch.set_num_threads(command.threads)
        self._config = command.config
        # As on rank 0, until all can run steps: some load longer than others.
        self._group.timeout_s = LOAD_TIMEOUT_S
        self._groups = groups = join_groups(command.config, self._group, self._memories)
        self._model = load_sharded(command.config, groups.stage, groups.pipeline)
        compare_shards(command.config, self._model, groups.stage)
        self._model = with_kv_dtype(command.config, self._model)
        self._weights = WeightSyncManager(self._model.module, shards=self._shards)
        self._receiver = RankReceiver(self._group.rank, self._calls, self._shards)
        threading.Thread(target=self._receiver.serve, daemon=True, name="weights-calls").start()


def serve(connection: Connection, worker: Worker) -> None:
    """Execute rank 0's commands until the connection is closed.

    Raises:
        RankError: Another rank has failed.
    """
    decoder = do.decoder()
    while True:
        command = decoder.decode(connection.recv_bytes())
        try:
            worker.run(command)
            if not isinstance(command, do.Replied):
                continue
            reports = isinstance(command, do.Report | do.Prepare)
            reply = worker.report() if reports else do.Reply()
        except ModelError as error:
            reply = do.Reply(error=error.message, code=error.code)
            if not isinstance(command, do.Resume | do.StageAdapter):
                # Rank 0 may be waiting for this one within an operation of the group.
                connection.send_bytes(msgspec.msgpack.encode(reply))
                worker.fail(error.message)
                continue
        connection.send_bytes(msgspec.msgpack.encode(reply))


def run_rank(rank: int, connection: Connection, calls: Connection, memories: Sequence[int]) -> None:
    """Be a rank until its connection is closed, or a rank fails."""
    try:
        group = SharedMemoryGroup.attach(memories[0], rank)
    except RankError:
        return  # rank 0 has given up
    worker = Worker(group, memories[1:], calls)
    try:
        with suppress(EOFError, OSError):
            serve(connection, worker)
    except RankError as error:
        worker.fail(str(error))
    except BaseException as error:
        worker.fail(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def main() -> None:
    server = socket.socket(fileno=int(sys.argv[1]))
    # Rank 0 ends this process by closing the connection, and ranks are for it to watch.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prepare_loading()
    while True:
        rank, descriptors, _, _ = socket.recv_fds(server, 64, MOST_DESCRIPTORS)
        if not rank:
            return
        if pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            server.send(str(pid).encode())
            continue
        status = 1
        try:
            server.close()
            own, memories = descriptors[:2], descriptors[2:]
            run_rank(int(rank), Connection(own[0]), Connection(own[1]), memories)
            status = 0
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)


if __name__ == "__main__":
    main()
