"""The fork server: a Python that has imported torch and this package, and forks itself for every program asked for.

`tests/_fork.py` starts it and talks to it. A child becomes the program as a new interpreter would: its own arguments,
working directory, environment, descriptors, signals and limits; what it saves is the two seconds that `import torch`
takes. It forks twice, and the process between the two ends at once, so that the kernel gives the child to the nearest
subreaper above the server: to whoever asked, as if that had started it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PAD = "HEADWAY_TEST_PAD"
"""A variable that makes room for a child's environment in memory where `ps` and psutil read it."""
FAR = 200
"""Descriptors are moved from here upwards before they get the numbers that were asked for."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
PRELOADED = [
    "pytest",
    "hypothesis",
    "psutil",
    # The first step of any optimizer imports it, which takes more than a second.
    "torch._dynamo",
    "headway.cli.main",
    "headway.training.runs",
    "headway.training.trainer",
    "headway.launch.launcher",
    "headway.launch.ranks",
    "headway.data.loader",
    "headway.data.pack",
    "headway.comm.coordinator_client",
    "headway.comm.hvd",
    "headway.watch.script_watch",
    "headway.watch.loop_watch",
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing",
    "torch.optim",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    # What a training imports on its way; numpy.ma alone takes 50 ms.
    "numpy.ma",
    "numpy.ctypeslib",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.PpmImagePlugin",
    "headway.optim.sgd",
    "headway.training.distributed",
]
_filters: list[Any] = []


def _send(channel: socket.socket, *numbers: int) -> None:
    channel.sendall(struct.pack(f"{len(numbers)}q", *numbers))


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = channel.recv(count - len(data))
        if not more:
            os._exit(0)  # whoever asked has ended
        data += more
    return data


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and its descriptors; ends this process where nobody will ask any more."""
    head, ancillary, _, _ = channel.recvmsg(8, socket.CMSG_SPACE(64 * 4))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    head += _exactly(channel, 8 - len(head))
    return pickle.loads(_exactly(channel, struct.unpack("q", head)[0])), list(fds)


def serve(channel: socket.socket) -> None:
    """Returns in each child, once it has become what was asked for, and never in the server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        request, fds = _receive(channel)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            ready, grouped = os.pipe()
            child = os.fork()
            if child:
                # As after a start by exec, whoever asked may signal the child's group at once: it has to be there.
                os.close(grouped)
                os.read(ready, 1)
                _send(channel, child)
                os._exit(0)
            _join_group(request)
            os.close(grouped)
            os.close(ready)
            while os.getppid() == between:
                time.sleep(0.0002)
            channel.close()
            _run(request, fds)
        os.waitpid(between, 0)
        _send(channel, os.getpid())
        for fd in fds:
            os.close(fd)


def _run(request: dict[str, Any], fds: list[int]) -> NoReturn:
    try:
        _place(request, fds)
        if request["launches"]:
            _open_nested()
        _show(request["argv"], request["environ"])
    except BaseException:
        traceback.print_exc()
        os._exit(127)
    _leave(_main(request["argv"]))


def _join_group(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    if request["group"] is not None:
        os.setpgid(0, request["group"])


def _place(request: dict[str, Any], fds: list[int]) -> None:
    """Descriptors, signals, limits, folder and environment."""
    fds = [_far(fd) for fd in fds]
    numbers = [0, 1, 2, *request["pass_fds"]]
    for fd, number in zip(fds, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    os.sched_setaffinity(0, request["affinity"])
    os.umask(request["umask"])
    for name, value in zip(LIMITS, request["limits"], strict=True):
        if resource.getrlimit(name) != value:
            resource.setrlimit(name, value)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environb.update(request["environ"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="PYTHONUNBUFFERED" in os.environ)
    sys.stderr.reconfigure(line_buffering=True)

    import numpy
    import torch

    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(request["affinity"])))


def _far(fd: int) -> int:
    import fcntl

    far = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FAR)
    os.close(fd)
    return far


def _open_nested() -> None:
    """A server of this program's own, for the processes that it will start: a fork of what is still untouched."""
    from tests import _fork

    mine, its = socket.socketpair()
    server = os.fork()
    if server == 0:
        mine.close()
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _show([b"headway-fork-server"], {})
        serve(its)
    its.close()
    _fork.install(_fork.Server(mine, server))


def _show(argv: list[bytes], environ: dict[bytes, bytes]) -> None:
    """Writes arguments and environment where /proc/PID/cmdline and /proc/PID/environ are read from."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    arguments, variables = [int(field) for field in fields[45:47]], [int(field) for field in fields[47:49]]
    for (start, end), words in (
        (arguments, argv),
        (variables, [name + b"=" + value for name, value in environ.items()]),
    ):
        text = b"\0".join(words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _main(argv: list[bytes]) -> int:
    """Runs the program as the interpreter's main module and returns its exit status."""
    try:
        _program([os.fsdecode(word) for word in argv])
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", "<frozen os>"):
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _program(words: list[str]) -> None:
    sys.orig_argv = list(words)
    rest, safe = words[1:], False
    while rest[0] in ("-W", "-P", "-u"):
        if rest[0] == "-W":
            sys.warnoptions.append(rest[1])
            action = rest[1].partition(":")[0]
            assert action == rest[1], "only an action"
            warnings.simplefilter(action)  # type: ignore[arg-type]
            # Behind the filters that libraries have set on import, as if it had been there before them.
            warnings.filters.insert(len(warnings.filters) - len(_filters) - 1, warnings.filters.pop(0))  # type: ignore
            rest = rest[1:]
        safe = safe or rest[0] == "-P"
        rest = rest[1:]
    importlib.invalidate_caches()
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        sys.path[:0] = [""] * (not safe)
        exec(compile(rest[1], "<string>", "exec"), vars(main))
    elif rest[0] == "-m":
        sys.argv = ["-m", *rest[2:]]
        sys.path[:0] = [os.getcwd()] * (not safe)
        sys.modules.pop(rest[1], None)  # or runpy warns
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
    else:
        sys.argv = list(rest)
        sys.path[:0] = [os.path.dirname(os.path.realpath(rest[0]))] * (not safe)
        main.__file__ = os.path.abspath(rest[0])
        main.__cached__ = None  # type: ignore[attr-defined]
        with open(rest[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, vars(main))


def _leave(status: int) -> NoReturn:
    """As the interpreter ends: threads, what is registered, what is buffered; but memory is left to the kernel."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _filters[:] = warnings.filters
    sys.path.pop(0)
    os.environ.pop(PAD)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, root)
    import tests._fork  # noqa: F401

    sys.path.pop(0)
    for module in ["numpy", "torch", "torch.distributed", *PRELOADED]:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    if "headway.cli.main" in sys.modules:
        sys.modules["headway.cli.main"].build_command()
    # At its end a child would take every operator of torch's libraries back: half of what an empty program takes.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
