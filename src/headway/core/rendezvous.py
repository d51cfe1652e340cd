"""Rendezvous of processes that another launcher (torchrun, mpirun, srun) started, at a store that rank 0 serves.

On one host, rank 0 writes the port of its store and a secret to a file that only this user can read. On several hosts
the secret is HEADWAY_SECRET, and rank 0's store listens at MASTER_ADDR:MASTER_PORT. torchrun's own store already has
that port; rank 0 then takes another one and announces it there with a MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import psutil

from headway.core.errors import CommunicationError, UsageError
from headway.core.hosts import choose_listening_address, find_interface_address, find_own_address, is_loopback_name
from headway.core.key_value_store import StoreClient, StoreServer, build_store
from headway.core.launcher_environment import LOOPBACK, LaunchedProcess
from headway.core.process_group import read_start_time
from headway.core.torch_c10d import load_c10d
from headway.core.untrusted_json import parse_value

LOG = logging.getLogger("headway.core")

# How long ranks wait for rank 0 at the start.
CONNECT_S = 300.0
POLL_S = 0.02
# How long rank 0 serves the store after its own end: a rank that has not left by then hangs.
LINGER_S = 10.0
# Least characters of HEADWAY_SECRET: a shorter one could be guessed.
SHORTEST_SECRET = 16

# Public secret of multi-host runs without HEADWAY_SECRET: it keeps out processes of other runs, but no attacker.
TRUSTED = "headway: this run trusts its network"


def new_secret() -> str:
    """Returns a random secret for one run."""
    return secrets.token_hex(32)


def read_secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Returns HEADWAY_SECRET, or None if it is not set.

    Raises:
        UsageError: it is too short.
    """
    text = (os.environ if environ is None else environ).get("HEADWAY_SECRET", "")
    if not text:
        return None
    if len(text) < SHORTEST_SECRET:
        what = f"HEADWAY_SECRET has {len(text)} characters, which can be guessed"
        raise UsageError(what, fix=f"Set it to {SHORTEST_SECRET} or more, for example from `openssl rand -hex 32`.")
    return text.encode()


def is_public_secret(secret: bytes) -> bool:
    """Returns True if anybody can know this secret: that of a multi-host run without HEADWAY_SECRET."""
    return secret.startswith(TRUSTED.encode())


@final
class Rendezvous:
    """The store of a run that another launcher started, and its secret.

    Attributes:
        store: store with the interface of torch.distributed's.
        secret: the run's secret.
        attempt: restarts so far; torchrun restarts all processes after a failure.
    """

    def __init__(
        self, server: StoreServer | None, client: StoreClient, attempt: int, note: _SecretFile | None = None
    ) -> None:
        self._server, self.secret, self.attempt, self._note = server, client.secret, attempt, note
        self._client = client
        self.store: Any = build_store(client)

    def confirm(self) -> None:
        """Removes the file with the secret, once all processes have joined."""
        if self._server is not None and self._note is not None:
            self._note.remove()

    def close(self) -> None:
        """Leaves the store. Rank 0 first waits for the others, which may still have values to read."""
        self._client.close()
        server, self._server = self._server, None
        if server is not None:
            server.close_after_others(LINGER_S)

    def __del__(self) -> None:
        if self._server is not None:
            self._server.stop()


def join_rendezvous(launched: LaunchedProcess, interface: str | None) -> Rendezvous:
    """Connects to the store of the run, which rank 0 starts and serves.

    Args:
        launched: this process, with an address and a port.
        interface: network interface, if the user names one.

    Raises:
        UsageError: HEADWAY_SECRET is too short.
        CommunicationError: rank 0 cannot be reached within CONNECT_S.
    """
    assert launched.address is not None
    assert launched.port is not None
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    secret, server = read_secret(), None
    # Without a local size, only a loopback address means that all ranks share this host.
    on_one_host = (
        is_loopback_name(launched.address) if launched.local_size is None else launched.size == launched.local_size
    )
    if on_one_host:
        note = _SecretFile(launched, attempt)
        if launched.rank == 0:
            secret = secret or new_secret().encode()
            server = StoreServer(secret, LOOPBACK)
            note.write(server.port, secret)
        port, noted = note.read()
        return Rendezvous(server, _connect_client(secret or noted, LOOPBACK, port), attempt, note)
    if secret is None:
        secret = f"{TRUSTED}/{launched.address}/{launched.port}".encode()
        if launched.rank == 0:
            LOG.warning(
                "HEADWAY_SECRET is not set: anybody who can reach these hosts over the network can join this run. "
                "Set it to the same secret on all hosts."
            )
    # Under torchrun, MASTER_PORT belongs to the agent's store, so ours takes a port of its own.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if launched.rank == 0:
            server = _serve(secret, launched.address, launched.port)
        return Rendezvous(server, _connect_client(secret, launched.address, launched.port), attempt)
    agent = _connect_agent_store(launched.address, launched.port)
    key = f"headway/{_compute_mac(secret, 'key', str(attempt))[:32]}"
    if launched.rank == 0:
        address = find_interface_address(interface) if interface else find_own_address(launched.address)
        server = StoreServer(secret, address)
        place = json.dumps([address, server.port])
        agent.set(key, json.dumps([place, _compute_mac(secret, "place", str(attempt), place)]))
    address, port = _read_announced_address(agent, key, secret, attempt)
    return Rendezvous(server, _connect_client(secret, address, port), attempt)


def _connect_client(secret: bytes, address: str, port: int) -> StoreClient:
    try:
        return StoreClient(secret, address, port, refused_s=CONNECT_S)
    except OSError as error:
        what, fix = "the store of rank 0 cannot be reached", "Is the address right, and the port open?"
        raise CommunicationError(f"{what} ({error})", where=f"{address}:{port}", fix=fix) from error


def _serve(secret: bytes, address: str, port: int) -> StoreServer:
    """Starts rank 0's store for the launcher's address, which may be a router's."""
    try:
        return StoreServer(secret, choose_listening_address(address), port)
    except OSError as error:
        fix = "Set MASTER_PORT to a free port of rank 0's host."
        raise CommunicationError(f"rank 0 cannot listen ({error})", where=f"{address}:{port}", fix=fix) from error


def _connect_agent_store(address: str, port: int) -> Any:
    """Connects to torchrun's own store. It is unauthenticated, so values from it are checked by their MAC."""
    wait = timedelta(seconds=CONNECT_S)
    try:
        return load_c10d().TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        what, fix = "torchrun's store cannot be reached", "Is the address right, and the port open?"
        raise CommunicationError(what, where=f"{address}:{port}", fix=fix) from error


def _read_announced_address(agent: Any, key: str, secret: bytes, attempt: int) -> tuple[str, int]:
    """Waits for the address of rank 0's store; values without the run's MAC are ignored."""
    until_s = time.monotonic() + CONNECT_S
    while time.monotonic() < until_s:
        # JsonError is a ValueError: deeply nested JSON from a stranger is ignored like any other garbage.
        with suppress(ValueError, TypeError, KeyError):
            if agent.check([key]):
                place, mac = parse_value(agent.get(key))
                if hmac.compare_digest(mac, _compute_mac(secret, "place", str(attempt), place)):
                    address, port = json.loads(place)
                    return str(address), int(port)
        time.sleep(POLL_S)
    fix = "Do all hosts have the same HEADWAY_SECRET, and does rank 0 run?"
    raise CommunicationError(f"rank 0 did not announce its store within {CONNECT_S:g} s", where=key, fix=fix)


def _compute_mac(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, json.dumps(parts).encode(), "sha256").hexdigest()


@final
class _SecretFile:
    """The port and the secret of one job on one host, in a file that only this user can read."""

    def __init__(self, launched: LaunchedProcess, attempt: int) -> None:
        job = [launched.launcher, launched.address, launched.port, attempt, os.environ.get("TORCHELASTIC_RUN_ID", "")]
        name = hashlib.sha256(json.dumps(job).encode()).hexdigest()[:32]
        self._path = _create_private_folder() / name

    def write(self, port: int, secret: bytes) -> None:
        """Writes the file, on rank 0, in place of one that an earlier job has left."""
        aside = self._path.with_suffix(f".{os.getpid()}")
        content = json.dumps([os.getpid(), read_start_time(os.getpid()), port, secret.decode()])
        with suppress(FileNotFoundError):
            aside.unlink()
        # O_EXCL and O_NOFOLLOW: a link that another user has prepared must not get the secret.
        number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "w") as file:
            file.write(content)
        aside.rename(self._path)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()

    def read(self) -> tuple[int, bytes]:
        """Waits for the port and the secret; a file whose writer has ended is of an earlier job."""
        until_s = time.monotonic() + CONNECT_S
        while time.monotonic() < until_s:
            with suppress(FileNotFoundError, psutil.NoSuchProcess):
                with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                    if os.fstat(file.fileno()).st_uid != os.getuid():
                        raise CommunicationError("this file belongs to another user", where=str(self._path))
                    pid, since, port, secret = json.loads(file.read())
                if read_start_time(pid) == since:
                    return int(port), str(secret).encode()
            time.sleep(POLL_S)
        what = f"rank 0 did not announce its store within {CONNECT_S:g} s"
        fix = "Do all processes run on one host, as one user?"
        raise CommunicationError(what, where=str(self._path), fix=fix)


def _create_private_folder() -> Path:
    """Creates a folder of mode 0700 for this user on this host.

    Raises:
        CommunicationError: the path exists and is not this user's alone.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(runtime) / "headway" if runtime and os.access(runtime, os.W_OK) else Path(f"/tmp/headway-{os.getuid()}")
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # `lstat`: a link to a folder of this user would pass the checks below.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        what = "other users can access this folder, so no secret can be stored in it"
        raise CommunicationError(what, where=str(folder), fix="Remove it, or set XDG_RUNTIME_DIR to a private folder.")
    return folder
