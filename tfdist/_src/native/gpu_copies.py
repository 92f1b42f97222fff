"""A program that copies data between all pairs of GPUs, and prints a line of JSON for each pair.

    python -m tfdist._src.native.gpu_copies LIBRARY SECONDS

LIBRARY is the path or name of the driver's library ("" for the system's driver). SECONDS is the
time limit for a copy.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import random
import sys
import time

from tfdist._src.native.nvidia import Copy, Driver, DriverError, Link

_BYTES = 32 << 20
_TIMES = 8  # the number of copies that are timed together
_RANK, _ATOMICS = 1, 3  # CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, _NATIVE_ATOMIC_SUPPORTED
_NON_BLOCKING, _NO_TIMING = 1, 2  # CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING
_NOT_READY, _REACHED = 600, 704  # CUDA_ERROR_NOT_READY, _PEER_ACCESS_ALREADY_ENABLED
_TAKEN = (2, 46)  # CUDA_ERROR_OUT_OF_MEMORY, _DEVICE_UNAVAILABLE


class _Stuck(Exception):
    """A copy has not ended within the time limit."""


class _Gpu:
    """A GPU that has values in its memory, and can copy the values of other GPUs."""

    def __init__(self, driver: Driver, number: int, seconds: float) -> None:
        self._driver, self._seconds = driver, seconds
        self._context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._use()
        self._values = bytearray(random.Random(number).randbytes(_BYTES))
        self._memory = self._allocate()
        self._renew()
        self._copy(self._memory, _address(self._values))
        self._wait()

    def reach(self, owner: _Gpu) -> None:
        """Enables this GPU to read the memory of another GPU directly."""
        self._use()
        try:
            self._driver.call("cuCtxEnablePeerAccess", owner._context, 0)
        except DriverError as error:
            if error.status != _REACHED:
                raise

    def read(self, owner: _Gpu) -> tuple[Copy, float]:
        """Copies the values of another GPU to this GPU.

        Returns:
            The outcome, and the number of bytes per second.
        """
        self._use()
        try:
            words = ctypes.c_size_t(_BYTES // 4)
            self._driver.call("cuMemsetD32Async", self._landing, 0, words, self._stream)
            self._copy(self._landing, owner._memory)
            self._wait()
            start = time.perf_counter()
            for _ in range(_TIMES):
                self._copy(self._landing, owner._memory)
            self._wait()
            seconds = time.perf_counter() - start
            arrived = bytearray(_BYTES)
            self._copy(_address(arrived), self._landing)
            self._wait()
        except _Stuck:
            # Creates new memory and a new stream, because the unfinished copy may still use the old
            # ones.
            self._renew()
            return Copy.STUCK, 0.0
        if arrived != owner._values:
            return Copy.WRONG, 0.0
        return Copy.INTACT, _TIMES * _BYTES / seconds

    def _use(self) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)

    def _renew(self) -> None:
        self._landing = self._allocate()
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        create = "cuStreamCreateWithPriority"
        self._driver.call(create, ctypes.byref(self._stream), _NON_BLOCKING, 0)
        self._driver.call("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)

    def _allocate(self) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(_BYTES))
        return address

    def _copy(self, to: ctypes.c_uint64, source: ctypes.c_uint64) -> None:
        size = ctypes.c_size_t(_BYTES)
        self._driver.call("cuMemcpyAsync", to, source, size, self._stream)

    def _wait(self) -> None:
        self._driver.call("cuEventRecord", self._event, self._stream)
        deadline = time.monotonic() + self._seconds
        while not self._has_passed():
            if time.monotonic() > deadline:
                raise _Stuck

    def _has_passed(self) -> bool:
        try:
            self._driver.call("cuEventQuery", self._event)
        except DriverError as error:
            if error.status != _NOT_READY:
                raise
            return False
        return True


class _Trial:
    """Tries copies between pairs of GPUs, one pair after the other."""

    def __init__(self, driver: Driver, seconds: float) -> None:
        self._driver, self._seconds = driver, seconds
        self._gpus: dict[int, _Gpu] = {}

    def link(self, reader: int, owner: int) -> Link:
        """Tries a copy between two GPUs.

        Args:
            reader: the number of the GPU that reads.
            owner: the number of the GPU that owns the memory.

        Returns:
            A description of the link, with the outcome of the copy.
        """
        link = Link(reader, owner, Copy.FAILED)
        try:
            direct = self._ask("cuDeviceCanAccessPeer", reader, owner) == 1
            link = self._described(dataclasses.replace(link, direct=direct))
            by, of = self._gpu(reader), self._gpu(owner)
            if direct:
                by.reach(of)
            copy, speed = by.read(of)
            return dataclasses.replace(link, copy=copy, speed=speed)
        except DriverError as error:
            copy = Copy.TAKEN if error.status in _TAKEN else Copy.FAILED
            return dataclasses.replace(link, copy=copy, error=error.call)
        except _Stuck:
            return dataclasses.replace(link, error="a copy from the host's memory does not end")

    def _gpu(self, number: int) -> _Gpu:
        if number not in self._gpus:
            self._gpus[number] = _Gpu(self._driver, number, self._seconds)
        return self._gpus[number]

    def _described(self, link: Link) -> Link:
        function, pair = "cuDeviceGetP2PAttribute", (link.reader, link.owner)
        try:
            rank, atomics = (self._ask(function, kind, *pair) for kind in (_RANK, _ATOMICS))
        except DriverError:
            return link  # The driver does not report these attributes.
        return dataclasses.replace(link, rank=rank, atomics=atomics == 1)

    def _ask(self, function: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self._driver.call(function, ctypes.byref(value), *arguments)
        return value.value


def _address(buffer: bytearray) -> ctypes.c_uint64:
    return ctypes.c_uint64(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))


def main() -> None:
    """Tries a copy for each pair of GPUs, and prints the outcome."""
    driver = Driver(sys.argv[1])
    trial = _Trial(driver, float(sys.argv[2]))
    for pair in itertools.permutations(range(len(driver.devices())), 2):
        print(json.dumps(dataclasses.asdict(trial.link(*pair))), flush=True)
    os._exit(0)  # A normal exit would wait for copies that do not end.


if __name__ == "__main__":
    main()
