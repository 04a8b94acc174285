"""glibc's allocator, told to keep what a training step frees."""

import ctypes
import mmap
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
HEAP = 2**30  # bytes of the allocator's memory that are in huge pages


def keep_freed_memory() -> None:
    """Lets glibc's allocator reuse what a step frees, in huge pages; nothing happens without glibc.

    By itself it gives much of that memory back, and the next step has it zeroed again, page by page; and small
    pages are more than a processor's table of them holds. Peak memory stays what it was.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    libc.mallopt(M_MMAP_THRESHOLD, 2 * HEAP - 1)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = (
        [ctypes.c_void_p],
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    )
    if begin := libc.malloc(HEAP):  # the next addresses that it will hand out; none is touched yet
        page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(page, begin + HEAP - page, mmap.MADV_HUGEPAGE)
        libc.free(begin)
