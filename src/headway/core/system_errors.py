"""What the system refuses, as a sentence: a disk that is full or read only, too little memory, too many open files."""

from __future__ import annotations

import errno
import re
import resource

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error

FIXES = {
    errno.EROFS: "Name a place on a file system that can be written.",
    errno.EACCES: "Get the right to it, or name another place.",
    errno.EPERM: "Get the right to it, or name another place.",
    errno.EMFILE: "Allow more open files: ulimit -n 65536.",
    errno.ENFILE: "Allow more open files: sysctl fs.file-max.",
    errno.ENAMETOOLONG: "Give it a shorter name.",
    errno.EIO: "The disk or the network has failed: look at dmesg, and copy the data elsewhere.",
    errno.ESTALE: "The network file system has lost it: mount it anew.",
    errno.ENOENT: "Check the name.",
    errno.EFBIG: "Name a place that takes larger files, or raise ulimit -f.",
}

FULL = (errno.ENOSPC, errno.EDQUOT)

NO_MEMORY = re.compile(
    r"allocate memory|not enough memory|out of memory|can't start new thread|bad_alloc|failed to map segment|"
    r"Resource temporarily unavailable|cannot map|MemoryError",
    re.IGNORECASE,
)
"""What PyTorch, the dynamic loader, Python's threads and C++ say where there is too little memory."""

MORE_MEMORY = "Allow more (ulimit -v, the control group), or take a smaller batch, fewer threads, or a smaller network."


LEAST_BYTES = 1 << 30
"""Address space below which PyTorch is not begun with: 150 MB are refused by the loader, 600 MB let glibc abort."""


LOAD_TORCH = {"train", "evaluate", "predict", "landscape", "doctor", "tune", "bench-links"}
"""Verbs that load PyTorch."""


def expect_address_space(verb: str) -> None:
    """Before PyTorch is loaded. Raises UsageError: `ulimit -v` leaves too little for it."""
    if verb not in LOAD_TORCH:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        what = f"ulimit -v allows {limit // 1024:,} kB, and PyTorch needs {LEAST_BYTES // 1024:,} kB of address space"
        raise UsageError(what, fix="Allow more: ulimit -v unlimited.")


def explain_system_error(error: BaseException) -> HeadwayError | None:
    """The sentence for an error of the system; None where it is none: then it is a fault of the program."""
    if isinstance(error, OSError) and not _is_out_of_memory(error):
        return _explain_os_error(error)
    if _is_out_of_memory(error):
        said = str(error).strip().splitlines()
        detail = f" ({said[0][:200]})" if said else ""
        return HeadwayError(f"there is not enough memory{detail}", fix=MORE_MEMORY)
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)):
        return True
    kinds = (RuntimeError, ImportError) if not isinstance(error, OSError) else (OSError,)
    return isinstance(error, kinds) and NO_MEMORY.search(str(error)) is not None


def _explain_os_error(error: OSError) -> HeadwayError:
    where = "" if error.filename is None else str(error.filename)
    if error.errno in FULL:
        what = f"the disk is full ({where or 'no space left'})"
        return HeadwayError(what, fix="Nothing before it is lost; make room and try again.")
    reason = describe_os_error(error) or type(error).__name__
    if error.filename2 is not None:
        where = f"{where} -> {error.filename2}"
    if isinstance(error, BrokenPipeError) and not where:
        return HeadwayError("whoever reads the output has gone")
    what = f"this cannot be read or written ({reason})" if where else f"the system refuses it ({reason})"
    return HeadwayError(what, where=where, fix=FIXES.get(error.errno or 0, ""))
