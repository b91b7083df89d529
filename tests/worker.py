"""Started in place of Python with a socket's path: has `workers.py` run Python's arguments there.

It lasts as long as the fork.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    message = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()])
    socket.send_fds(connection, [message.encode()], [0, 1, 2])
    for number in (0, 1):
        os.close(number)
    connection.recv(1)
