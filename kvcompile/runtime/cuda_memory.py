"""Ranges of a GPU's addresses that take memory piece by piece: the virtual memory of the CUDA driver.

A cache's tensors keep their addresses, strides and compiled code while they grow, and captured CUDA graphs stay right.
The driver maps whole pieces (2 MiB on the GPUs of today). What is mapped is filled with zeros before it is used, as
nobody promises that the driver does, and what is not mapped must not be touched: a kernel that reads it fails, and the
process's context with it. Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcompile.errors import LimitError
from kvcompile.util.console import format_bytes

log = logging.getLogger(__name__)
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED = _DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(RuntimeError):
    """The driver refused a call; `code` is its CUresult."""

    def __init__(self, call: str, code: int, message: str):
        super().__init__(f"{call}: {message} (CUDA driver error {code})")
        self.code = code


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocFlags(ctypes.Structure):
    """The last member of CUmemAllocationProp; all zero here."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver(Protocol):
    """What the ranges of one device need of a driver. Addresses and sizes are multiples of `granularity`, in bytes."""

    @property
    def granularity(self) -> int:
        """Bytes of the least piece that can be mapped."""

    def reserve(self, size: int) -> int:
        """The address of a range without memory."""

    def map(self, address: int, size: int) -> None:
        """Give memory to a part of a range that has none."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory of one `map` back."""

    def free(self, address: int, size: int) -> None:
        """Give a range back, no part of which has memory."""

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """The bytes of a range as a tensor that keeps `owner`; its first piece is mapped."""

    def idle(self) -> None:
        """Wait until nothing that was launched uses a range."""

    def spare(self) -> None:
        """Give back what PyTorch holds and nobody uses."""

    def device_of(self) -> AbstractContextManager[Any]:
        """Where kernels that fill a range are launched."""


class CudaDriver:
    """libcuda's calls for the device of one index."""

    def __init__(self, library: Any, index: int):
        self._library, self._index = library, index
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, index))
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self.granularity = size.value

    @classmethod
    def of(cls, device: torch.device) -> CudaDriver | None:
        """The driver of a CUDA device; None where it maps no memory (with the reason in the log)."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # so that the device has a context
        try:
            library = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "windll") else "libcuda.so.1")
            supported = ctypes.c_int()
            if (
                not library.cuDeviceGetAttribute(ctypes.byref(supported), _SUPPORTED, index)
                and supported.value
            ):
                return cls(library, index)
            reason = "the device has no virtual memory management"
        except (OSError, AttributeError, DriverError) as error:
            reason = str(error)
        log.warning("caches on %s are allocated for all of max_tokens at once: %s", device, reason)
        return None

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            told = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(told))
            raise DriverError(name, code, (told.value or b"unknown error").decode())

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            zero,
            zero,
        )
        return address.value

    def map(self, address: int, size: int) -> None:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        where, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        try:
            self._call("cuMemMap", where, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:  # the mapping keeps the memory; without one it goes
            self._call("cuMemRelease", handle)
        access = _Access(_Location(_DEVICE, self._index), _READ_WRITE)
        try:
            self._call("cuMemSetAccess", where, length, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        return torch.as_tensor(_Bytes(address, size, owner), device=torch.device("cuda", self._index))

    def idle(self) -> None:
        torch.cuda.synchronize(self._index)

    def spare(self) -> None:
        torch.cuda.empty_cache()

    def device_of(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._index)


class _Bytes:
    """What PyTorch takes as memory of a GPU (the CUDA array interface, version 3), and keeps while a tensor has it."""

    def __init__(self, address: int, size: int, owner: object):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class MappedRange:
    """Zeros on a GPU for `size` bytes, of which parts take memory when `hold` asks for them.

    It gives everything back when the last tensor of it is gone.
    """

    def __init__(self, driver: Driver, size: int):
        """
        Raises:
            LimitError: the driver gives no addresses for so many bytes, or has no memory for the first piece.
        """
        self.driver = driver
        piece = driver.granularity
        self._size, self._pieces = size, -(-size // piece)
        self._mapped = bytearray(self._pieces)
        self._maps: list[tuple[int, int]] = []
        try:
            self._address = driver.reserve(self._pieces * piece)
        except DriverError as error:
            raise LimitError(
                f"the driver gives no addresses for a cache tensor of {format_bytes(size)} ({error}): set a lower "
                "runtime.max_tokens or max_batch"
            ) from error
        self._finalizer = weakref.finalize(
            self, _give_back, driver, self._address, self._pieces * piece, self._maps
        )
        self._map(0, 1)  # PyTorch asks the driver whose memory stands at the address
        self._zero(0, 1)

    def bytes(self) -> Tensor:
        """All of the range, uint8 [size]; it lives as long as a tensor of it does."""
        return self.driver.tensor(self._address, self._size, self)

    @property
    def nbytes(self) -> int:
        """Bytes that have memory."""
        return sum(self._mapped) * self.driver.granularity

    def hold(self, start: int, end: int) -> None:
        """Let the bytes from `start` to `end` have memory, zeros where they had none.

        Raises:
            LimitError: the device has no more; what was held still is.
        """
        piece = self.driver.granularity
        for first, last in self._without(start // piece, min(self._pieces, -(-end // piece))):
            self._map(first, last)
            self._zero(first, last)

    def _without(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs of pieces from `first` to before `last` that have no memory."""
        while (begin := self._mapped.find(0, first, last)) >= 0:
            end = self._mapped.find(1, begin, last)
            first = last if end < 0 else end
            yield begin, first

    def _map(self, first: int, last: int) -> None:
        piece = self.driver.granularity
        address, size = self._address + first * piece, (last - first) * piece
        try:
            try:
                self.driver.map(address, size)
            except DriverError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                self.driver.spare()  # PyTorch may hold what nobody uses
                self.driver.map(address, size)
        except DriverError as error:
            raise LimitError(
                f"no memory for {format_bytes(size)} more of the cache: {error}; set a lower runtime.max_tokens or "
                "max_batch, or choose a recipe that takes less (kvcompile.estimate says how much)"
            ) from error
        self._mapped[first:last] = b"\1" * (last - first)
        self._maps.append((address, size))

    def _zero(self, first: int, last: int) -> None:
        piece = self.driver.granularity
        with self.driver.device_of():
            self.bytes()[first * piece : last * piece].zero_()


def _give_back(driver: Driver, address: int, size: int, maps: list[tuple[int, int]]) -> None:
    try:
        driver.idle()
        for part, length in maps:
            driver.unmap(part, length)
        driver.free(address, size)
    except (RuntimeError, AttributeError) as error:  # the device has failed before, or Python is ending
        log.debug("a cache's memory was not given back: %s", error)


@cache
def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device whose caches can grow; None: they are allocated at once."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    driver = CudaDriver.of(device)
    problem = None if driver is None else trial(driver)
    if problem is None:
        return driver
    log.warning("caches on %s are allocated for all of max_tokens at once: %s", device, problem)
    return None


def trial(driver: Driver) -> str | None:
    """What goes wrong where a driver's memory is used as a cache uses it, or None."""
    piece = driver.granularity
    try:
        memory = MappedRange(driver, 3 * piece)
        found = memory.bytes()
        memory.hold(piece - 1, 2 * piece)
        used = found[: 2 * piece]
        fresh = bool(used.any())
        used.fill_(7)
        wrong = fresh or not bool((used == 7).all()) or memory.nbytes != 2 * piece
    except Exception as error:  # whatever a driver or PyTorch raises: the usual way is there
        return f"{type(error).__name__}: {error}"
    return "its memory does not hold what is written" if wrong else None
