"""What becomes of memory that was freed: the process keeps it, and need not ask for it again."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST, LARGEST_BEFORE = 2**31 - 1, 2**25
"""The largest threshold that glibc takes, and that earlier versions took."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, where that is glibc's to decide; say whether it does.

    Otherwise large pieces are given back at once and come back page by page, each filled with zeros first:
    with minibatches of 16,384 steps a third of all time. Whoever has told the allocator what to do is left
    alone: by MALLOC_..._ or GLIBC_TUNABLES.
    """
    told = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if told or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    kept = library.mallopt(M_TRIM_THRESHOLD, LARGEST)
    large = library.mallopt(M_MMAP_THRESHOLD, LARGEST) or library.mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE)
    return bool(kept and large)
