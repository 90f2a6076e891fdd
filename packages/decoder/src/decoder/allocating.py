"""The C library's memory while a model is loaded: what is freed goes back to the system.

Of pieces that come and go glibc learns to keep up to 64 MB for others like them. That saves a decoder time, and while a
model is loaded, which leaves such pieces behind that nothing of their size follows, it costs 50 MB at the peak.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_SMALL, _LARGE = 1 << 20, 1 << 25


def give_back() -> None:
    """Have pieces of a megabyte and more given back as soon as they are freed, until `keep`."""
    _set(_SMALL)


def keep() -> None:
    """Give back what is free now, and have pieces of up to 32 MB kept from now on, which glibc learns at most."""
    libc = _set(_LARGE)
    if libc is not None:
        libc.malloc_trim(0)


def _set(size: int) -> ctypes.CDLL | None:
    """glibc, if it is what allocates here."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.mallopt(_MMAP_THRESHOLD, size)
    libc.mallopt(_TRIM_THRESHOLD, 2 * size)
    return libc
