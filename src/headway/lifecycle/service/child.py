"""Runs a verb of headway as the child of a server, and ends it with the server.

The server holds the other end of standard input. If it is killed, that end closes, and the verb gets SIGTERM, as it
does if somebody cancels its job: a training then writes a checkpoint.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Runs `headway` with the arguments of this process."""
    # A copy of the pipe: what the verb starts must not read from it.
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="headway-parent").start()
    sys.argv[0] = "headway"
    runpy.run_module("headway", run_name="__main__")


if __name__ == "__main__":
    main()
