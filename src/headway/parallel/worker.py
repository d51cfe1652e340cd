"""A worker of asynchronous training: it reads weights and a step, and sends the gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from headway.parallel.flat_tensors import FlatTensors, decode_state
from headway.parallel.host import OVER, PULL, PUSH, STATE, ServerHost, State
from headway.parallel.ledger import Lease
from headway.parallel.pairs import Pair, ServerPairs
from headway.parallel.server import Push


@final
class AsyncWorker:
    """One worker of a segment.

    Args:
        rank: this worker.
        weights: the network's weights by name.
        buffers: the network's buffers.
        shares: names of the weights of each server.
        host: the server in this process, if there is one.
        pairs: connections to the other servers; None: this process trains alone.
    """

    def __init__(
        self,
        rank: int,
        weights: Mapping[str, Tensor],
        buffers: Sequence[Tensor],
        shares: Sequence[Sequence[str]],
        host: ServerHost | None,
        pairs: ServerPairs | None,
    ) -> None:
        self._rank, self._host, self._pairs = rank, host, pairs
        self._own = -1 if host is None else rank
        self._weights = [[weights[name] for name in names] for names in shares]
        # The leader also has the buffers.
        self._buffers = [list(buffers), *([] for _ in shares[1:])]
        self._flat = {
            server: FlatTensors([*shard, *self._buffers[server]])
            for server, shard in enumerate(self._weights)
            if server != self._own
        }
        self._pushed: Push | None = None
        self.states: list[State] = []

    def push(self, push: Push) -> None:
        """Notes the gradients that the weights have now, and the buffers: they are sent by the next `pull`."""
        self._pushed = push
        for server, shard in enumerate(self._weights):
            gradients = [weight.grad for weight in shard]
            flat = self._flat[server] if server != self._own else self._get_host().server.inboxes[self._rank]
            flat.pack([*gradients, *self._buffers[server]])

    def pull(self) -> Lease | None:
        """Sends what was pushed, and reads weights and buffers for the next step into the network.

        Returns None once the segment is over; `states` then has the state of each server.

        Raises:
            CommunicationError: a server is gone.
        """
        push, self._pushed = self._pushed, None
        if push is not None:
            # The followers first; see `server`.
            for server in range(1, len(self._weights)):
                if server != self._own:
                    self._send_push(self._get_pair(server), server, push)
                    self._get_pair(server).receive_numbers()
        lease = self._ask_lead(push)
        if lease is None:
            self.states += [self._read_state(server) for server in range(1, len(self._weights))]
            return None
        for server in range(len(self._weights)):
            self._load(server, self._receive_weights(server))
        return lease

    def _ask_lead(self, push: Push | None) -> Lease | None:
        if self._own == 0:
            host = self._get_host()
            assert host.lead is not None
            lease = host.lead.exchange(self._rank, push)
            if lease is None:
                self.states.append(host.collect_state())
            return lease
        pair = self._get_pair(0)
        if push is None:
            pair.send_numbers(PULL)
        else:
            self._send_push(pair, 0, push)
        kind, step, version, hint, *_ = pair.receive_numbers()
        if kind == OVER:
            self.states.append(_receive_state(pair, int(step)))
            return None
        return Lease(int(step), int(version), None if hint < 0 else int(hint))

    def _send_push(self, pair: Pair, server: int, push: Push) -> None:
        pair.send_numbers(PUSH, push.loss, push.bad, push.stops)
        pair.send(self._flat[server].data)

    def _receive_weights(self, server: int) -> FlatTensors:
        if server == self._own:
            return self._get_host().server.outboxes[self._rank].wait()
        pair = self._get_pair(server)
        # The leader's answer is on its way; a follower is asked.
        if server:
            pair.send_numbers(PULL)
        pair.receive(self._flat[server].data)
        return self._flat[server]

    @torch.no_grad()
    def _load(self, server: int, flat: FlatTensors) -> None:
        for tensor, value in zip([*self._weights[server], *self._buffers[server]], flat.views, strict=True):
            tensor.copy_(value)

    def _read_state(self, server: int) -> State:
        if server == self._own:
            host = self._get_host()
            host.wait_until_over()
            return host.collect_state()
        pair = self._get_pair(server)
        pair.send_numbers(STATE)
        _, length, *_ = pair.receive_numbers()
        return _receive_state(pair, int(length))

    def _get_host(self) -> ServerHost:
        assert self._host is not None
        return self._host

    def _get_pair(self, server: int) -> Pair:
        assert self._pairs is not None
        return self._pairs.to_servers[server]


def merge_states(states: Sequence[State]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the scalars of the leader, and the tensors of all servers."""
    return states[0][0], {name: value for _, tensors in states for name, value in tensors.items()}


def _receive_state(pair: Pair, length: int) -> State:
    data = torch.empty(length, dtype=torch.uint8)
    pair.receive(data)
    return decode_state(data)
