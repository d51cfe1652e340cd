"""Programs of ours in tests start from one preloaded server instead of as new interpreters.

`install()` makes `subprocess` ask the server of `tests/_fork_server.py` wherever a test, or a launcher that a test has
started, runs this very Python: `subprocess.run([sys.executable, "-m", "headway", ...])` then takes hundredths of a
second, and everything else about it is as ever: the process is a child of who started it. Where a start needs what a
fork cannot give (interpreter options, another user, a namespace of its own), it is a new interpreter; also in a test
marked `fresh`, and everywhere with HEADWAY_TEST_FORK=0.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
SWITCH = "HEADWAY_TEST_FORK"
LAUNCHERS = (
    "--procs",
    "--hosts",
    "torch.distributed.run",
    "bench-links",
    "launch",
    "subprocess",
    "tune",
    "script_child",
)
"""Programs whose arguments have one of these words may start programs of ours themselves."""
FOREIGN = ("pytest", "pip", "venv", "mypy", "compileall")
"""Modules that are not ours and care for what is imported already."""
UNDERSTOOD = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
NAMESPACES = ("net", "mnt", "pid", "user")
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_start_anew = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_libc = ctypes.CDLL(None, use_errno=True)


@final
class Server:
    """The server's process and the socket on which it is asked."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel, self.pid = channel, pid
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Server:
        mine, its = socket.socketpair()
        with its:
            place = str(Path(__file__).with_name("_fork_server.py"))
            # One thread and no torch warnings: the libraries read these once, when they are loaded.
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environ["HEADWAY_TEST_PAD"] = "x" * 60_000
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, place, str(_inheritable(its)), "x" * 60_000],
                environ,
                setsigdef=[signal.SIGINT],
            )
        return cls(mine, pid)

    def is_mine(self) -> bool:
        return self._owner == os.getpid()

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """Process id of the new child, which is this process's own."""
        data = pickle.dumps(request)
        with self._lock, _adopting():
            socket.send_fds(self._channel, [struct.pack("q", len(data))], fds)
            self._channel.sendall(data)
            answer = b""
            while len(answer) < 16:
                more = self._channel.recv(16 - len(answer))
                if not more:
                    raise ConnectionResetError("the fork server of the tests has ended")
                answer += more
        return struct.unpack("2q", answer)[0]

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self.pid, 0)


def _inheritable(its: socket.socket) -> int:
    its.set_inheritable(True)
    return its.fileno()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """For the time of the block, orphans below this process become its children."""
    before = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


_server: Server | None = None
_is_fresh = False


def install(server: Server | None = None) -> None:
    """From now on, `subprocess` asks the server, which is started at the first use unless it is given."""
    global _server
    _server = server
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def server_pid() -> int | None:
    """The server's process, if this process has started one."""
    return _server.pid if _server is not None and _server.is_mine() else None


def close() -> None:
    """Ends the server; its time then counts as that of a child which was waited for."""
    global _server
    if _server is not None and _server.is_mine():
        _server.close()
    _server = None


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Within the block every program is a new interpreter."""
    global _is_fresh
    before, _is_fresh = _is_fresh, True
    try:
        yield
    finally:
        _is_fresh = before


def _can_fork(argv: list[str], environ: dict[bytes, bytes]) -> bool:
    """Whether a fork of the server is no different from a new interpreter, for what is asked."""
    if _is_fresh or environ.get(SWITCH.encode()) == b"0" or argv[0] != sys.executable:
        return False
    rest = argv[1:]
    while rest and rest[0] in ("-W", "-P", "-u"):
        rest = rest[1 + (rest[0] == "-W") :]
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return False
    if rest[0] in ("-c", "-m") and len(rest) < 2:
        return False
    if rest[0] == "-c" and "sys.modules" in rest[1]:  # it asks what is imported
        return False
    if rest[0] == "-m" and rest[1].partition(".")[0] in FOREIGN:
        return False
    return not any(name.startswith(b"PYTHON") and os.fsdecode(name) not in UNDERSTOOD for name in environ)


def _same_namespaces(server: Server) -> bool:
    return all(os.stat(f"/proc/self/ns/{name}") == os.stat(f"/proc/{server.pid}/ns/{name}") for name in NAMESPACES)


def _execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
    pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:12]
    restore_signals, gid, gids, uid, umask, start_new_session, process_group = rest[12:]
    global _server
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
    source = os.environb if env is None else env
    environ = {os.fsencode(name): os.fsencode(value) for name, value in source.items()}
    plain = executable is None and preexec_fn is None and close_fds and not shell and restore_signals
    plain = plain and gid is None and gids is None and uid is None and umask < 0 and (cwd is None or os.path.isdir(cwd))
    if plain and words and _can_fork(words, environ) and not (_server is not None and not _server.is_mine()):
        if _server is None:
            _server = Server.start()
        if _same_namespaces(_server):
            wanted = (p2cread, c2pwrite, errwrite)
            fds = [number if number >= 0 else standard for standard, number in enumerate(wanted)]
            request = {
                "argv": [os.fsencode(word) for word in words],
                "environ": environ,
                "cwd": os.path.abspath(os.fsdecode(cwd)) if cwd is not None else os.getcwd(),
                "pass_fds": list(pass_fds),
                "session": start_new_session,
                "group": process_group if process_group >= 0 else None,
                "ignored": {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
                - {signal.SIGPIPE, signal.SIGXFSZ},
                "mask": set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                "affinity": os.sched_getaffinity(0),
                "umask": _umask(),
                "limits": [resource.getrlimit(name) for name in LIMITS],
                "launches": any(word in text for text in words[1:] for word in LAUNCHERS),
            }
            with contextlib.suppress(ConnectionError):  # a test that kills at random has killed it
                self.pid = _server.fork(request, [*fds, *pass_fds])
                self._child_created = True
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
                return
    _start_anew(self, args, executable, preexec_fn, close_fds, *rest)


def _umask() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
