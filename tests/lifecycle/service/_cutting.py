"""A proxy that cuts connections after given numbers of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Passes connections on to a server. Each of the first ones is cut after so many bytes of the client.

    Attributes:
        passed_bytes: bytes that clients have sent.
    """

    def __init__(self, address: tuple[str, int], cuts: list[int]) -> None:
        self._address, self._cuts = address, list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.passed_bytes = 0
        self._thread = threading.Thread(target=self._run)
        self._is_closing = False

    @property
    def cuts_left(self) -> int:
        return len(self._cuts)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        # Wakes the thread that accepts.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 5).close()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_closing:
                client.close()
                return
            with client, socket.create_connection(self._address) as server:
                for part in self._pass(client, server):
                    self.passed_bytes += part

    def _pass(self, client: socket.socket, server: socket.socket) -> Iterator[int]:
        """One connection; yields the bytes of each part. Requests of one client come one after the other."""
        back = threading.Thread(target=self._pass_back, args=(server, client))
        back.start()
        count = 0
        with contextlib.suppress(ConnectionError):
            # No more than up to the cut: how much comes at once depends on how busy the machine is.
            while data := client.recv(max(1, self._cuts[0] - count) if self._cuts else 65536):
                yield len(data)
                count += len(data)
                # Only bodies are cut: a short request has no place for it.
                if self._cuts and count >= self._cuts[0]:
                    self._cuts.pop(0)
                    server.shutdown(socket.SHUT_RDWR)
                    client.shutdown(socket.SHUT_RDWR)
                    break
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)
        back.join()

    @staticmethod
    def _pass_back(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
