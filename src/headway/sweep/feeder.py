"""A feeder: decodes each batch once for several processes of a sweep. `python -m headway.sweep.feeder DESCRIPTOR`.

The descriptor is that of a listening socket. Commands come as JSON lines on standard input, answers go as JSON lines to
what was standard output. When the input ends, because the coordinator has ended or was killed, the feeder ends too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any, final

import torch

from headway.core.recipe import LoadedRecipe
from headway.data.batch_plan import BatchPlan
from headway.setup.inputs import Inputs, open_inputs
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.sweep.child import answer, take_output
from headway.sweep.feed import describe_request, is_of_same_user, receive, send
from headway.sweep.feed_ring import PATIENCE, Feed
from headway.sweep.worker import decode_assignment


@final
class Feeder:
    """Serves one feed after another, of one group of equal inputs.

    Args:
        listener: the socket to which readers connect.
        commands: descriptor of the commands.
        out: descriptor for the answers.
        patience: see `Feed`.
    """

    def __init__(self, listener: socket.socket, commands: int, out: int, patience: float = PATIENCE) -> None:
        self._listener, self._commands, self._out, self._patience = listener, commands, out, patience
        self._rest = b""
        self._loaded: LoadedRecipe[TrainRecipe] | None = None
        self._inputs: Inputs | None = None
        self._number = -1
        self._feed: Feed | None = None
        self._is_ending = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until the input ends."""
        while not self._is_ending:
            feed, timeout = self._feed, None
            if feed is not None:
                deadline = feed.check_patience(time.monotonic())
                timeout = 0.0 if feed.is_ready else None if deadline is None else deadline - time.monotonic()
            self._listen(timeout)
            if (feed := self._feed) is None:
                continue
            if feed.is_over:
                self._end_feed("")
            elif feed.is_ready:
                self._serve(feed)
        self._end_feed("the sweep ends")
        if self._inputs is not None:
            self._inputs.close()

    def _serve(self, feed: Feed) -> None:
        try:
            feed.serve()
        # Each reader reads on by itself, and meets the same error if it is one of the data.
        except Exception as error:
            traceback.print_exc()
            self._answer({"failed": str(error)})
            self._end_feed(f"the feeder failed: {error}")

    def _end_feed(self, why: str) -> None:
        if self._feed is not None:
            self._feed.close(why)
            self._answer({"ended": self._number})
        self._feed = None

    def _listen(self, timeout: float | None) -> None:
        """Takes in what has arrived; waits for it at most so long."""
        for key, _ in self._selector.select(None if timeout is None else max(0.0, timeout)):
            if key.fd == self._commands:
                self._read_commands()
            elif key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                if is_of_same_user(connection):
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    connection.close()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read_packet(key.fileobj)

    def _read_packet(self, connection: socket.socket) -> None:
        try:
            packet, _ = receive(connection)
        except OSError:
            packet = None
        if packet is None:
            if self._feed is not None:
                self._feed.drop(connection)
            self._selector.unregister(connection)
            connection.close()
        elif self._feed is not None and "done" in packet:
            self._feed.note_done(connection, packet["done"])
        elif "slot" in packet and (
            self._feed is None or packet["feed"] != self._number or not self._feed.join(connection, packet)
        ):
            with suppress(OSError):
                send(connection, {"end": "it reads other batches than the others"})
                connection.shutdown(socket.SHUT_WR)

    def _read_commands(self) -> None:
        data = os.read(self._commands, 1 << 20)
        self._is_ending = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "feed" in command:
                self._begin_feed(command)
            elif self._feed is not None and command["of"] == self._number:
                self._feed.leave(command["left"])

    def _begin_feed(self, command: Mapping[str, Any]) -> None:
        self._end_feed("another one began")
        self._number = command["feed"]
        if self._loaded is None or self._inputs is None:
            self._loaded, self._inputs = open_feed_inputs(decode_assignment(command["assignment"]).loaded)
        recipe, inputs = self._loaded.recipe, self._inputs
        plan = BatchPlan(recipe.global_batch, recipe.batch_growth, epoch=inputs.samples)
        request = describe_request(inputs.build_state(recipe), plan, 0)
        self._feed = Feed(
            request,
            lambda position: iter(inputs.build_batches(recipe, plan, position)),
            set(command["slots"]),
            self._answer,
            self._patience,
        )

    def _answer(self, message: dict[str, Any]) -> None:
        answer(self._out, message)


def open_feed_inputs(loaded: LoadedRecipe[TrainRecipe]) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
    """Opens the training set of a recipe, for batches in host memory.

    Raises:
        HeadwayError: see `open_inputs`.
    """
    loaded = resolve_batch(loaded, 1).resolve("data.eval", None, "the readers evaluate")
    return open_inputs(loaded, torch.device("cpu"), opens_data=True)


def main() -> None:
    """Runs the feeder whose socket the command line names."""
    out = take_output()
    # Ctrl-C of the terminal reaches the coordinator, which ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with closing(socket.socket(fileno=int(sys.argv[1]))) as listener:
        Feeder(listener, 0, out).run()


if __name__ == "__main__":
    main()
