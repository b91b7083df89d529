"""The program that `ranks.ForkedServer` runs, with its connection as standard input."""

from __future__ import annotations

import sys

from nano_inference.stages.executor.runner import rank_worker

if __name__ == "__main__":
    sys.argv[1:] = ["0"]
    rank_worker.main()
