"""Recurrent state of the simulated model: a hash of the tokens so far, and what computed them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from nano_inference.bus.parts.states import StatePlan, StateStart
from nano_inference.bus.steps import NewSequence, StepPlan

from . import model

Kind = tuple[int, int]


class State(NamedTuple):
    """A state.

    Attributes:
        chain: Hash of its tokens.
        kinds: The numbers of all weights and adapters that computed it.
    """

    chain: int
    kinds: frozenset[Kind] = frozenset()

    def after(self, tokens: Iterable[int], kind: Kind) -> list[State]:
        """Return the states after each of these tokens."""
        states, chain = [], self.chain
        for token in tokens:
            chain = model.extend(chain, token)
            states.append(State(chain, self.kinds | {kind}))
        return states


class SimulatedStates:
    """The states of an executor's sequences, and its snapshots, which outlive an epoch."""

    def __init__(self, num_snapshots: int) -> None:
        self.snapshots = [State(-1)] * num_snapshots
        self._of: dict[int, State] = {}
        # Of the step: states after each of a sequence's tokens, and the number of tokens before.
        self._passed: dict[int, tuple[int, list[State]]] = {}

    def start(self, new: NewSequence) -> State:
        """Set and return the state in which a sequence begins; a shared prefill gets its own later.

        Raises:
            ValueError: KV is cached, and no snapshot is named.
        """
        state, start = State(model.begin(new.cache_scope)), StateStart.find(new.parts)
        if start is not None:
            state = self.snapshots[start.snapshot]
        elif 0 < new.num_cached < len(new.token_ids):
            raise ValueError(f"sequence {new.seq_id} begins without its state")
        self._of[new.seq_id] = state
        return state

    def compute(self, seq_id: int, before: int, tokens: Iterable[int], kind: Kind) -> None:
        """Compute tokens after so many before."""
        passed = self._of[seq_id].after(tokens, kind)
        self._passed[seq_id] = before, passed
        self._of[seq_id] = passed[-1]

    def go_on(self, seq_id: int, before: int, token: int, kind: Kind) -> None:
        """Compute a drafted token that was right, in the same step."""
        first, passed = self._passed.get(seq_id, (before, []))
        self.compute(seq_id, before, [token], kind)
        self._passed[seq_id] = first, [*passed, *self._passed[seq_id][1]]

    def share(self, seq_id: int, source: int) -> None:
        """Copy the state of the sequence whose prefill another one shares."""
        self._of[seq_id] = self._of[source]

    def chain(self, seq_id: int) -> int:
        """Return the hash of a sequence's tokens."""
        return self._of[seq_id].chain

    def save(self, plan: StepPlan, ran: Collection[int]) -> None:
        """Make the snapshots of a plan, after its rows; `ran`: sequences whose rows ran.

        Raises:
            ValueError: The step doesn't pass a state.
        """
        for save in (StatePlan.find(plan.parts) or StatePlan(())).saves:
            if save.seq_id in ran:
                before, states = self._passed[save.seq_id]
                index = save.num_tokens - before - 1
                if not 0 <= index < len(states):
                    raise ValueError(f"sequence {save.seq_id} has no state at {save.num_tokens}")
                self.snapshots[save.snapshot] = states[index]
        self._passed.clear()

    def reset(self) -> None:
        """Forget all sequences."""
        self._of.clear()
        self._passed.clear()
