"""Plans in flight over pipeline-parallel stages."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ....bus.control import ReplicaCapacity
from ....config import EngineConfig
from ..sequence import Sequence
from . import Core, Part


class Pipelining(Part):
    """Chooses the sequences of the next of several plans in flight.

    No sequence is in two plans in flight: none of them waits for another one's tokens. A plan has
    an even share of the sequences, so that plans fill the pipeline-parallel stages alike.
    """

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._num_stages = 1
        if core.steps_ahead > 1:
            self._num_stages = capacity.pipeline_stages
            core.steps_ahead = self._num_stages + 1

    def choose(self, num_waiting: int) -> tuple[Seq[Sequence], int]:
        sent, running = self.core.sent, self.core.running
        most = self.core.limits.max_batch_size
        share = -(-min(len(running) + num_waiting, most) // self._num_stages)
        if sent:
            if sum(bool(each.seqs) for each in sent) >= self._num_stages:
                return (), 0  # another plan would only split the shares
            oldest = sent[0].plan.step_id
            running = [seq for seq in running if seq.last_step < oldest]
        # What is left over fits another plan, since that has less than its share.
        running = running[:share]
        return running, share - len(running)
