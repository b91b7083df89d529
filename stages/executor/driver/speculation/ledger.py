"""Whether drafts are worth the time that it takes to have them."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.1
"""Of the newest step, in the averages."""

_TRIAL_STEPS = 16
"""So many steps are not judged, the first time and after each rest."""

_FIRST_REST = 16

_READ_FOR = 256
"""What reading prompts takes is spread over about so many steps with drafts."""


@dataclass(slots=True)
class DraftLedger:
    """What the drafts of a source took and what they saved, in seconds, step by step.

    Where they take more than they save, the source is not asked for 16 steps, and for twice as many
    each time that happens again.

    Attributes:
        most_rest: For so many steps at most.
        spent: Average of what its drafts took, with a part of what steps without a draft did.
        saved: Average of what they saved.
    """

    most_rest: int
    spent: float = 0.0
    saved: float = 0.0
    _owed: float = 0.0
    _judged_in: int = _TRIAL_STEPS
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Whether the source is to be asked in the step that begins."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    @property
    def rests(self) -> bool:
        """Whether the source is not to be asked."""
        return self._rest > 0

    def take_rest(self) -> int:
        """In so many steps the source is not to be asked, which the caller sees to."""
        rest, self._rest = self._rest, 0
        return rest

    def settle(self, spent: float, saved: float, *, least_gain: float) -> None:
        """A step is over for which the source was asked.

        Args:
            spent: In it.
            saved: In it.
            least_gain: So many times what is spent has to be saved.
        """
        part = self._owed / _READ_FOR
        self._owed -= part
        self.spent += _WEIGHT * (spent + part - self.spent)
        self.saved += _WEIGHT * (saved - self.saved)
        self._judge(self.spent, least_gain)

    def owe(self, seconds: float, *, least_gain: float) -> None:
        """A step is over in which the source took so long and drafted nothing, as a model does
        while it reads a prompt: the drafts that come have to earn that too."""
        self._owed += seconds
        # One in which no sequence wanted a draft takes next to nothing, and shows nothing.
        if seconds > self.spent:
            # The average has parts of what is owed already.
            self._judge(max(self.spent, self._owed / _READ_FOR), least_gain)

    def _judge(self, spent: float, least_gain: float) -> None:
        self._judged_in -= 1
        if self._judged_in > 0:
            return
        if self.saved >= least_gain * spent:
            self._next_rest = _FIRST_REST
            return
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, self.most_rest)
        self._judged_in = _TRIAL_STEPS
