"""A remote shell over plain TCP, for hosts where nobody else is: what goes through it is lost where the link is cut.

_shell.py serve ADDRESS          prints its port, and runs the commands that come
_shell.py PORT ADDRESS COMMAND   runs a command there; stdin, stdout and the exit status are those of the command
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable


def pump(read: Callable[[int], bytes], write: Callable[[bytes], object], end: Callable[[], object]) -> None:
    try:
        while data := read(1 << 16):
            write(data)
    except OSError:
        pass
    end()


def serve(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=run, args=(server.accept()[0],), daemon=True).start()


def run(connection: socket.socket) -> None:
    command = b""
    while not command.endswith(b"\0"):
        command += connection.recv(1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(["sh", "-c", command[:-1].decode()], start_new_session=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into = threading.Thread(target=pump, args=(connection.recv, process.stdin.write, process.stdin.close))
        into.start()
        pump(process.stdout.read, connection.sendall, process.wait)
        connection.shutdown(socket.SHUT_RDWR)
        into.join()


def call(port: str, address: str, command: str) -> None:
    with socket.create_connection((address, int(port)), timeout=60) as connection:
        connection.settimeout(None)
        connection.sendall(command.encode() + b"\0")

        def end() -> None:
            connection.shutdown(socket.SHUT_WR)

        into = threading.Thread(target=pump, args=(lambda size: os.read(0, size), connection.sendall, end), daemon=True)
        into.start()
        pump(connection.recv, lambda data: os.write(1, data), lambda: None)
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "serve" else call(*sys.argv[1:])
