"""Memory of a GPU that can be freed and allocated again at the same address, by CUDA's virtual memory management.

A range of addresses is reserved once. Physical memory is mapped into it, and unmapped when others need it: the contents
are lost, the address stays, so captured graphs that use it stay valid. PyTorch's allocator does not guarantee that, so
this memory is outside of it.

    reserve --map--> [ in use ] --unmap--> [ address only ] --map--> [ in use, other contents ] ...
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_tlt.errors import BackendError
from megatron_tlt.observe.memory import count_outside

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED, _DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_Address, _Size, _Int, _Pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p

# Functions of the driver, with their arguments (cuda.h); without them ctypes passes addresses as 32 bits.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (_Pointer,),
    "cuCtxSetCurrent": (_Pointer,),
    "cuDevicePrimaryCtxRetain": (_Pointer, _Int),
    "cuMemGetAllocationGranularity": (_Pointer, _Pointer, _Int),
    "cuMemAddressReserve": (_Pointer, _Size, _Size, _Address, ctypes.c_uint64),
    "cuMemCreate": (_Pointer, _Size, _Pointer, ctypes.c_uint64),
    "cuMemMap": (_Address, _Size, _Size, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemSetAccess": (_Address, _Size, _Pointer, _Size),
    "cuMemUnmap": (_Address, _Size),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemAddressFree": (_Address, _Size),
}


class _Location(ctypes.Structure):
    _fields_ = (("type", _Int), ("id", _Int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", _Int),
        ("requestedHandleTypes", _Int),
        ("location", _Location),
        ("win32HandleMetaData", _Pointer),
        ("allocFlags", ctypes.c_uint8 * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", _Int))


class FixedMemory:
    """`nbytes` of one device. Allocated at first; then `release` and `take` in turns."""

    def __init__(self, nbytes: int, device: torch.device, driver: ctypes.CDLL | None = None):
        """Raises BackendError where the driver refuses, torch.OutOfMemoryError where memory is short."""
        self.nbytes, self._device = nbytes, device
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        for name, arguments in _FUNCTIONS.items():
            getattr(self._driver, name).argtypes = arguments
        ordinal = device.index if device.index is not None else torch.cuda.current_device()
        self._use_context(ordinal)
        location, none = _Location(_DEVICE, ordinal), (ctypes.c_uint8 * 8)()
        self._prop = AllocationProp(_PINNED, 0, location, None, none)
        self._access = AccessDesc(location, _READ_WRITE)
        step, address = _Size(), _Address()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._prop), 0)
        self._size = -(-nbytes // step.value) * step.value
        self._call("cuMemAddressReserve", ctypes.byref(address), self._size, 0, 0, 0)
        self.address, self.is_taken = int(address.value), False
        self.take()

    def take(self) -> None:
        """Maps memory with any contents. Raises torch.OutOfMemoryError if the device has not as much."""
        assert not self.is_taken
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._prop), 0)
        try:
            self._call("cuMemMap", self.address, self._size, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps it
        try:
            self._call("cuMemSetAccess", self.address, self._size, ctypes.byref(self._access), 1)
        except BaseException:
            self._driver.cuMemUnmap(self.address, self._size)
            raise
        self.is_taken = True
        count_outside(self._size)

    def release(self) -> None:
        """Frees the memory once the device has done its work. A read after it is a fault of the device."""
        assert self.is_taken
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._call("cuMemUnmap", self.address, self._size)
        self.is_taken = False
        count_outside(-self._size)

    def tensor(self) -> Tensor:
        """The bytes, uint8 [nbytes]; keeps this object."""
        return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See Numba's specification of it, version 3."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        """Frees memory and addresses; at the end of the process the driver may be gone, and so are they."""
        if getattr(self, "is_taken", False):
            self._driver.cuMemUnmap(self.address, self._size)
            count_outside(-self._size)
        if hasattr(self, "address"):
            self._driver.cuMemAddressFree(self.address, self._size)

    def _use_context(self, ordinal: int) -> None:
        """PyTorch's context, which is the device's primary one, also in a thread that has not used it yet."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: no {self.nbytes / 2**30:.2f} GiB are left on {self._device}")
        if error:
            raise BackendError(
                f"{name} failed with CUDA driver error {error}; rollout.release_cache: false does without it"
            )
