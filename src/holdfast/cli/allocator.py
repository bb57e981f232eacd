"""The C allocator of this process."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST, LARGEST_OLD = 2**31 - 1, 2**25
"""The largest threshold that glibc accepts, and that older versions accept."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory in this process; return whether it does.

    Otherwise large blocks go back to the system and return page by page, each zeroed first: with minibatches
    of 16,384 steps that is a third of all time. MALLOC_... and GLIBC_TUNABLES in the environment win.
    """
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    trim = libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
    mmap = libc.mallopt(M_MMAP_THRESHOLD, LARGEST) or libc.mallopt(M_MMAP_THRESHOLD, LARGEST_OLD)
    return bool(trim and mmap)
