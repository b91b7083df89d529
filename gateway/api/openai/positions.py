"""The position in a stream: the id of each event has it, and a client resumes after it."""

from __future__ import annotations

import re
from itertools import groupby

from ....config import RequestError, shown

UNBEGUN = -1
"""Position of a choice of which no part was sent."""

FINISHED = -2
"""Position of a choice that was sent whole."""

_WORDS = {"x": UNBEGUN, "f": FINISHED}
_NAMES = {number: word for word, number in _WORDS.items()}
_ID = re.compile(r"([0-9A-Za-z_-]{1,100})\.([0-9xf.~]+?)(\.u)?")
_RUN = re.compile(r"(x|f|[0-9]{1,9})(?:~([0-9]{1,6}))?")


class Position:
    """The number of tokens sent of each choice; one more, if the end of its message was sent too.

    As an id: the answer's id, and the choices in order, in runs of equal ones. `x` is a choice that
    has not begun, `f` a complete one, and `~3` three of the same. `u` at the end: the usage was
    sent.

        chatcmpl-5f…e2.17         17 tokens of the only choice
        cmpl-5f…e2.f~2.30.12.x~4  two of eight choices are complete, two have begun

    Attributes:
        usage: Whether the usage was sent.
    """

    def __init__(self, answer_id: str, choices: int) -> None:
        self._answer_id = answer_id
        self._sent = [UNBEGUN] * choices
        # Choices before `_complete` are complete; from `_begun` on none has begun.
        self._complete = 0
        self._begun = 0
        self.usage = False

    def __getitem__(self, index: int) -> int:
        return self._sent[index]

    @property
    def event_id(self) -> str:
        sent, complete, begun = self._sent, self._complete, self._begun
        runs = [_run(FINISHED, complete)] if complete else []
        runs += [_run(number, len(list(same))) for number, same in groupby(sent[complete:begun])]
        if begun < len(sent):
            runs.append(_run(UNBEGUN, len(sent) - begun))
        return f"{self._answer_id}.{'.'.join(runs)}{'.u' if self.usage else ''}"

    def move(self, index: int, sent: int) -> None:
        """Set the position of a choice."""
        self._sent[index] = sent
        self._begun = max(self._begun, index + 1)
        while self._complete < self._begun and self._sent[self._complete] == FINISHED:
            self._complete += 1


def answer_of(event_id: str) -> str:
    """Return the id of the answer that an event belongs to.

    Raises:
        RequestError: invalid_event_id.
    """
    return _parts(event_id)[0]


def read_position(event_id: str, answer_id: str, choices: int) -> Position:
    """Return the position of an answer's stream after an event.

    Raises:
        RequestError: invalid_event_id: it belongs to another stream.
    """
    named, runs, usage = _parts(event_id)
    position = Position(answer_id, choices)
    index = 0
    for run in runs.split("."):
        found = _RUN.fullmatch(run)
        number = int(found[2] or 1) if found else 0
        if named != answer_id or found is None or number < 1 or index + number > choices:
            raise invalid_event(event_id)
        sent = _WORDS[found[1]] if found[1] in _WORDS else int(found[1])
        for place in range(index, index + number):
            if sent != UNBEGUN:
                position.move(place, sent)
        index += number
    if index != choices:
        raise invalid_event(event_id)
    position.usage = bool(usage)
    return position


def _run(sent: int, number: int) -> str:
    name = _NAMES.get(sent) or str(sent)
    return name if number == 1 else f"{name}~{number}"


def _parts(event_id: str) -> tuple[str, str, str]:
    found = _ID.fullmatch(event_id)
    if found is None:
        raise invalid_event(event_id)
    return found[1], found[2], found[3] or ""


def invalid_event(event_id: str) -> RequestError:
    """The error for an id of no event of a stream."""
    return RequestError(
        f"{shown(event_id)} is no event of this stream; give the id of the last one that came",
        code="invalid_event_id",
    )
