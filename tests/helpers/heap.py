"""A heap as full of data as that of a process which has done something."""

import ctypes
import random

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def dirty(size: int, count: int = 400, keep: bool = True) -> None:
    """Leaves `count` free blocks of `size` bytes full of noise; with `keep` blocks in use keep them apart."""
    noise = random.Random(0).randbytes(size)
    blocks = [libc.malloc(size) for _ in range(2 * count)]
    for block in blocks:
        ctypes.memmove(block, noise, size)
    for block in blocks[::2] if keep else blocks:
        libc.free(block)
