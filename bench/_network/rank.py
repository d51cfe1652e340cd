"""One rank: holds all arms, and runs steps of the one whose turn it is."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from bench._network.arm import Arm

TIMEOUT_S = 120.0


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    # What libraries print goes to stderr; stdout is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: Mapping[str, object]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    torch.set_num_threads(1)
    first = asked["rank"] == 0
    port = 0 if first else json.loads(sys.stdin.readline())["port"]
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(asked["address"], port, is_master=first, wait_for_workers=False, timeout=timeout)
    if first:
        answer({"port": store.port})
    arms: dict[str, Arm]
    arms, facts = importlib.import_module(asked["arms"]).arms(asked, store)
    answer(facts)
    for line in sys.stdin:
        order = json.loads(line)
        arm = arms[order["arm"]]
        sleep(max(0.0, order["at"] - perf_counter()))
        for _ in range(order["steps"]):
            arm.step()
        ended = perf_counter()
        answer({"ended": ended, "found": arm.found()})
    os._exit(0)  # without a farewell to peers that end too


if __name__ == "__main__":
    main()
