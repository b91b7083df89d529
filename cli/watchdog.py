"""Ends processes when the one that started them was killed and can't do it itself."""

from __future__ import annotations

import subprocess
from contextlib import suppress

GRACE_S = 0.5
"""What processes have to leave in good order, once the one that started them was killed."""

# Waits for the end of a pipe that only its parent holds open; until then the parent tells it what
# to kill. It holds whatever those processes do meanwhile, such as load a model in one long call.
_SCRIPT = """
targets=' '
while read -r word target; do
    case $word in
        +) targets="$targets$target " ;;
        -) targets="${targets%%" $target "*} ${targets#*" $target "}" ;;
    esac
done
sleep "$0"
for target in $targets; do kill -s KILL -- "$target"; done
"""


class Watchdog:
    """A shell that kills its targets once this process has ended, in whatever way."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """`grace_s`: from the end of this process to the kill."""
        self._grace_s = grace_s
        self._targets: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, target: int) -> None:
        """Kill this process too, or with a negative number its process group."""
        if target not in self._targets:
            self._targets.add(target)
            self._say("+", target)

    def remove(self, target: int) -> None:
        """Forget a target that has ended: its number may become another's."""
        if target in self._targets and self._process is not None:
            self._targets.remove(target)
            self._say("-", target)

    def close(self) -> None:
        """Ends it; nothing is killed."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _say(self, word: str, target: int) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, str(self._grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not for it
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has ended it
            self._process.stdin.write(f"{word} {target}\n".encode())
