"""Errors of the operating system as messages with a fix: a full disk, too little memory, too many open files."""

from __future__ import annotations

import errno
import re
import resource

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import describe_os_error

FIXES = {
    errno.EROFS: "Choose a path on a file system that can be written.",
    errno.EACCES: "Get permission for it, or choose another path.",
    errno.EPERM: "Get permission for it, or choose another path.",
    errno.EMFILE: "Allow more open files: ulimit -n 65536.",
    errno.ENFILE: "Allow more open files: sysctl fs.file-max.",
    errno.ENAMETOOLONG: "Give it a shorter name.",
    errno.EIO: "The disk or the network has failed: read dmesg, and copy the data elsewhere.",
    errno.ESTALE: "The network file system has lost it: mount it again.",
    errno.ENOENT: "Check the name.",
    errno.EFBIG: "Choose a file system that takes larger files, or raise ulimit -f.",
}

FULL = (errno.ENOSPC, errno.EDQUOT)

# Messages of PyTorch, the dynamic loader, Python's threads and C++ when memory runs out: few of them are MemoryErrors.
NO_MEMORY = re.compile(
    r"allocate memory|not enough memory|out of memory|can't start new thread|bad_alloc|failed to map segment|"
    r"Resource temporarily unavailable|cannot map|MemoryError",
    re.IGNORECASE,
)

MORE_MEMORY = "Allow more (ulimit -v, the control group), or set a smaller batch, fewer threads or a smaller network."

# Least address space for importing PyTorch: with 150 MB the dynamic loader fails, with 600 MB glibc aborts.
LEAST_BYTES = 1 << 30

# Verbs that import PyTorch.
LOAD_TORCH = {
    "train",
    "evaluate",
    "predict",
    "landscape",
    "doctor",
    "tune",
    "bench-links",
    "ensemble",
    "export",
    "curve",
}


def expect_address_space(verb: str) -> None:
    """Checks the address space before a verb imports PyTorch.

    Raises:
        UsageError: `ulimit -v` leaves too little.
    """
    if verb not in LOAD_TORCH:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        what = f"ulimit -v allows {limit // 1024:,} kB, and PyTorch needs {LEAST_BYTES // 1024:,} kB of address space"
        raise UsageError(what, fix="Allow more: ulimit -v unlimited.")


def explain_system_error(error: BaseException) -> HeadwayError | None:
    """Returns the error to show for a failure of the system, or None for a fault of the program."""
    if isinstance(error, OSError) and not _is_out_of_memory(error):
        return _explain_os_error(error)
    if _is_out_of_memory(error):
        lines = str(error).strip().splitlines()
        detail = f" ({lines[0][:200]})" if lines else ""
        return HeadwayError(f"there is not enough memory{detail}", fix=MORE_MEMORY)
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)):
        return True
    # PyTorch's allocator raises RuntimeError, the dynamic loader ImportError; the text tells.
    kinds = (RuntimeError, ImportError) if not isinstance(error, OSError) else (OSError,)
    return isinstance(error, kinds) and NO_MEMORY.search(str(error)) is not None


def _explain_os_error(error: OSError) -> HeadwayError:
    where = "" if error.filename is None else str(error.filename)
    # A full disk stops runs that are otherwise fine: say that nothing is lost.
    if error.errno in FULL:
        what = f"the disk is full ({where or 'no space left'})"
        return HeadwayError(what, fix="Earlier files are complete. Free space and try again.")
    reason = describe_os_error(error) or type(error).__name__
    if error.filename2 is not None:
        where = f"{where} -> {error.filename2}"
    if isinstance(error, BrokenPipeError) and not where:
        return HeadwayError("the reader of the output has closed it")
    what = f"this cannot be read or written ({reason})" if where else f"the system refused a call ({reason})"
    return HeadwayError(what, where=where, fix=FIXES.get(error.errno or 0, ""))
