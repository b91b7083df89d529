"""Finds stop strings in text that comes in pieces, and holds back what may become one."""

from __future__ import annotations

import re
from functools import lru_cache


class StopStrings:
    """Watches the text of one sample.

    The match that is complete first wins, whichever stop string it is; of those that are complete
    with the same character, the longest. So the outcome doesn't depend on how the text is cut
    into pushes. The cost is linear in the text, however many stop strings there are.
    """

    __slots__ = ("_automaton", "_held", "_matched", "_state")

    def __init__(self, stop: tuple[str, ...]) -> None:
        """`stop` holds no empty string."""
        self._automaton = _automaton(stop)
        self._state = 0
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether a stop string is complete."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next text.

        Returns:
            Text that can't be part of a stop string any more, and whether a stop string is now
            complete: then all text before it has been returned, and nothing follows.
        """
        if self._matched:
            return "", True
        automaton, state = self._automaton, self._state
        begin = 0
        if state == 0:
            first = automaton.first_characters.search(text)
            if first is None:
                return text, False
            begin = first.start()
        seen = self._held + text
        shift = len(self._held)
        for position in range(begin, len(text)):
            state = automaton.step(state, text[position])
            length = automaton.match_length[state]
            if length:
                self._matched, self._held = True, ""
                return seen[: shift + position + 1 - length], True
        certain = len(seen) - automaton.depth[state]
        self._state, self._held = state, seen[certain:]
        return seen[:certain], False

    def finish(self) -> str:
        """The text ends here: what was held back and turned out to be no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Aho and Corasick, "Efficient string matching", 1975.

    A state is the longest end of the text so far that begins some stop string; 0 is the empty one.

    Attributes:
        depth: `[states]`, characters of that end: exactly what must be held back.
        match_length: `[states]`, length of the longest stop string that ends here, or 0.
        first_characters: Finds where a stop string could begin.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.depth = [0]
        self.match_length = [0]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        for string in stop:
            self._add(string)
        self._link()
        self.first_characters = re.compile("|".join(re.escape(c) for c in self._next[0]) or "(?!)")

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = following
        self.match_length[state] = len(string)

    def _link(self) -> None:
        """Links each state to the next shorter end that also begins a stop string."""
        queue = list(self._next[0].values())
        for state in queue:  # grows as it is walked: breadth first
            for character, following in self._next[state].items():
                self._shorter[following] = self.step(self._shorter[state], character)
                queue.append(following)
            if not self.match_length[state]:
                self.match_length[state] = self.match_length[self._shorter[state]]


# The samples of a request share one. Few are kept: sixteen stop strings of 1 kB make 5 MB of it.
@lru_cache(maxsize=16)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    return _Automaton(stop)
