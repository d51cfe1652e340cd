"""Meeting: where the processes of somebody else's launcher (torchrun, mpirun, srun) find each other and a secret.

On one host rank 0 leaves the address of its store, and a secret, in a file that nobody else can read. On several hosts
the secret is HEADWAY_SECRET; rank 0's store listens where the launcher says, or, since torchrun's own store has that
port, at another one that rank 0 tells there, with a MAC.
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
from headway.core.torch_c10d import load_c10d
from headway.core.untrusted_json import parse_value

LOG = logging.getLogger("headway.comm")

CONNECT_S = 300.0
"""How long processes wait for rank 0 at the start."""
POLL_S = 0.02
LINGER_S = 10.0
"""How long rank 0 serves the store after its own end, at most: a rank that has not left by then hangs."""
SHORTEST_SECRET = 16
"""Characters of HEADWAY_SECRET: fewer could be guessed by trying."""

TRUSTED = "headway: this run trusts its network"
"""The secret of runs without one on several hosts; it keeps out who comes by mistake, nobody else."""


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def read_secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """HEADWAY_SECRET; None where it is not set.

    Raises:
        UsageError: it is too short.
    """
    text = (os.environ if environ is None else environ).get("HEADWAY_SECRET", "")
    if not text:
        return None
    if len(text) < SHORTEST_SECRET:
        what = f"HEADWAY_SECRET has {len(text)} characters, which can be guessed"
        raise UsageError(what, fix=f"Give it {SHORTEST_SECRET} or more, as `openssl rand -hex 32` prints them.")
    return text.encode()


def is_public_secret(secret: bytes) -> bool:
    """Whether a run's secret is the one that anybody can know: that of several hosts without HEADWAY_SECRET."""
    return secret.startswith(TRUSTED.encode())


@final
class Rendezvous:
    """The store of a run that another launcher started.

    Attributes:
        store: as torch.distributed's are. secret: of the run. attempt: of the launcher, which restarts all processes.
    """

    def __init__(
        self, server: StoreServer | None, client: StoreClient, attempt: int, note: _SecretFile | None = None
    ) -> None:
        self._server, self.secret, self.attempt, self._note = server, client.secret, attempt, note
        self._client = client
        self.store: Any = build_store(client)

    def confirm(self) -> None:
        """All processes have come: what was left for them to find is removed."""
        if self._server is not None and self._note is not None:
            self._note.remove()

    def close(self) -> None:
        """Leaves the store. Who serves it waits for the others: what was said last has still to be read by them."""
        self._client.close()
        server, self._server = self._server, None
        if server is not None:
            server.close_after_others(LINGER_S)

    def __del__(self) -> None:
        if self._server is not None:
            self._server.stop()


def join_rendezvous(launched: LaunchedProcess, interface: str | None) -> Rendezvous:
    """Connects to the store of rank 0, which serves it.

    Args:
        launched: with an address and a port. interface: of the network, where the user names one.

    Raises:
        UsageError: HEADWAY_SECRET is too short. CommunicationError: rank 0 cannot be reached in CONNECT_S.
    """
    assert launched.address is not None
    assert launched.port is not None
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    secret, server = read_secret(), None
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
            LOG.warning("%s", "HEADWAY_SECRET is not set: whoever reaches the network of these hosts can join this run")
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
        what, fix = "the processes' meeting point cannot be reached", "Is the address right, and the port open?"
        raise CommunicationError(f"{what} ({error})", where=f"{address}:{port}", fix=fix) from error


def _serve(secret: bytes, address: str, port: int) -> StoreServer:
    """At the address that the launcher names, which may be a router's."""
    try:
        return StoreServer(secret, choose_listening_address(address), port)
    except OSError as error:
        fix = "Set MASTER_PORT to a free port of rank 0's host."
        raise CommunicationError(f"rank 0 cannot listen ({error})", where=f"{address}:{port}", fix=fix) from error


def _connect_agent_store(address: str, port: int) -> Any:
    """torchrun's own store. Whoever reaches it can write there, so what is read from it is not believed."""
    wait = timedelta(seconds=CONNECT_S)
    try:
        return load_c10d().TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        what, fix = "the processes' meeting point cannot be reached", "Is the address right, and the port open?"
        raise CommunicationError(what, where=f"{address}:{port}", fix=fix) from error


def _read_announced_address(agent: Any, key: str, secret: bytes, attempt: int) -> tuple[str, int]:
    """Where rank 0's store listens. What carries no MAC of the run's is passed over."""
    until_s = time.monotonic() + CONNECT_S
    while time.monotonic() < until_s:
        # JsonError is a ValueError: a stranger's brackets, however many, are passed over too.
        with suppress(ValueError, TypeError, KeyError):
            if agent.check([key]):
                place, mac = parse_value(agent.get(key))
                if hmac.compare_digest(mac, _compute_mac(secret, "place", str(attempt), place)):
                    address, port = json.loads(place)
                    return str(address), int(port)
        time.sleep(POLL_S)
    fix = "Do all hosts have the same HEADWAY_SECRET, and does rank 0 run?"
    raise CommunicationError("rank 0 did not say where the processes meet", where=key, fix=fix)


def _compute_mac(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, json.dumps(parts).encode(), "sha256").hexdigest()


@final
class _SecretFile:
    """A file for the processes of one job on one host, which only this user can read."""

    def __init__(self, launched: LaunchedProcess, attempt: int) -> None:
        job = [launched.launcher, launched.address, launched.port, attempt, os.environ.get("TORCHELASTIC_RUN_ID", "")]
        name = hashlib.sha256(json.dumps(job).encode()).hexdigest()[:32]
        self._path = _create_private_folder() / name

    def write(self, port: int, secret: bytes) -> None:
        """Of rank 0. A note that a job before has left is replaced."""
        aside = self._path.with_suffix(f".{os.getpid()}")
        content = json.dumps([os.getpid(), _read_start_time(os.getpid()), port, secret.decode()])
        with suppress(FileNotFoundError):
            aside.unlink()
        number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "w") as file:
            file.write(content)
        aside.rename(self._path)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()

    def read(self) -> tuple[int, bytes]:
        """The port and the secret, waited for; a note of a process that has ended is of another job."""
        until_s = time.monotonic() + CONNECT_S
        while time.monotonic() < until_s:
            with suppress(FileNotFoundError, psutil.NoSuchProcess):
                with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                    if os.fstat(file.fileno()).st_uid != os.getuid():
                        raise CommunicationError("this file belongs to somebody else", where=str(self._path))
                    pid, since, port, secret = json.loads(file.read())
                if _read_start_time(pid) == since:
                    return int(port), str(secret).encode()
            time.sleep(POLL_S)
        what, fix = "rank 0 did not say where the processes meet", "Do all processes run on one host, as one user?"
        raise CommunicationError(what, where=str(self._path), fix=fix)


def _read_start_time(pid: int) -> float:
    """When a process began, to tell it from another one that gets its number later.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    # In ticks since the boot: psutil's seconds move when somebody sets the clock.
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name before the other fields is in brackets, and may hold some itself; the start is field 22.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return psutil.Process(pid).create_time()


def _create_private_folder() -> Path:
    """A folder of this user's, mode 0700, on this host.

    Raises:
        CommunicationError: somebody else has made it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(runtime) / "headway" if runtime and os.access(runtime, os.W_OK) else Path(f"/tmp/headway-{os.getuid()}")
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        what = "this folder is not this user's alone, so that no secret can be left in it"
        raise CommunicationError(what, where=str(folder), fix="Remove it, or set XDG_RUNTIME_DIR to a private folder.")
    return folder
