"""The process that starts ranks, as a program that connects to the socket of its first argument."""

from __future__ import annotations

import socket
import sys

from nano_inference.stages.executor.runner import rank_worker

if __name__ == "__main__":
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    sys.argv[1] = str(connection.detach())
    rank_worker.main()
