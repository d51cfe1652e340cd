"""Lets the processes of a run share one GPU; Python imports this at its start, where it is on the path.

NCCL refuses two ranks on a GPU of one host. With another name of the host for each, it takes them for ranks of two
hosts, and joins them through a network interface.
"""

import os

if "LOCAL_RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['LOCAL_RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"

    from headway.core.world import World

    World._check_gpus = lambda self: None  # type: ignore[method-assign]
