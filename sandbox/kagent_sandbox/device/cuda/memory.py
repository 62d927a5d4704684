"""Device memory that two processes map: the judge allocates it, a launcher opens it.

The memory is exported as a file descriptor where the driver can: the descriptor is the permission,
so it reaches a launcher that runs as another user. Elsewhere it is a CUDA IPC handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass, field
from typing import Literal

import cuda.bindings.driver as driver
import torch

from kagent_sandbox.device.cuda.driver import GpuError, call, device_attribute

Transport = Literal["fd", "ipc"]
GRANULE_BYTES = 2 << 20
_HANDLE_BYTES = 64


def best_transport(index: int) -> Transport:
    """Choose how memory of a device reaches another process here."""
    with contextlib.suppress(GpuError):
        if device_attribute(index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            return "fd"
    return "ipc"


def make_current(index: int) -> None:
    """Make the device's primary context, which torch uses too, current in the calling thread.

    Raises:
        GpuError: There is no usable device.
    """
    call(driver.cuInit, 0, doing="starting the driver")
    device = call(driver.cuDeviceGet, index, doing="opening the device")
    context = call(driver.cuDevicePrimaryCtxRetain, device, doing="creating the context")
    call(driver.cuCtxSetCurrent, context, doing="entering the context")


@dataclass
class SharedMemory:
    """An allocation of the judge's that launchers can open."""

    index: int  # device
    nbytes: int  # a multiple of GRANULE_BYTES
    transport: Transport
    address: int
    handle: bytes = b""  # CUDA IPC handle, for transport "ipc"
    fd: int = -1  # for transport "fd"
    _closed: bool = field(default=False, repr=False)

    def close(self) -> None:
        """Give the memory back. Nothing may use the address afterwards."""
        if self._closed:
            return
        self._closed = True
        make_current(self.index)
        if self.transport == "ipc":
            call(driver.cuMemFree, driver.CUdeviceptr(self.address), doing="freeing an arena")
            return
        os.close(self.fd)
        address = driver.CUdeviceptr(self.address)
        _unmap(address, self.nbytes)
        _free_addresses(address, self.nbytes)


def allocate(nbytes: int, index: int, transport: Transport) -> SharedMemory:
    """Allocate device memory that can be opened elsewhere. Its contents are undefined.

    Raises:
        GpuError: Out of memory, or the driver cannot share memory.
    """
    nbytes = max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES
    make_current(index)
    if transport == "ipc":
        pointer = call(driver.cuMemAlloc, nbytes, doing=f"allocating an arena of {nbytes} bytes")
        handle = call(driver.cuIpcGetMemHandle, pointer, doing="exporting an arena")
        return SharedMemory(index, nbytes, transport, int(pointer), handle=_handle_bytes(handle))
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = index
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.requestedHandleTypes = kind
    allocation = call(
        driver.cuMemCreate, nbytes, prop, 0, doing=f"allocating an arena of {nbytes} bytes"
    )
    try:
        fd = call(
            driver.cuMemExportToShareableHandle, allocation, kind, 0, doing="exporting an arena"
        )
        try:
            address = _map(allocation, nbytes, index)
        except GpuError:
            os.close(fd)
            raise
    finally:
        call(driver.cuMemRelease, allocation, doing="releasing a handle")  # the mapping holds it
    return SharedMemory(index, nbytes, transport, address, fd=int(fd))


def open_shared(transport: Transport, handle: bytes, fd: int, nbytes: int, index: int) -> int:
    """Map memory that another process allocated; its address here. Takes the descriptor.

    Raises:
        GpuError: The driver refuses.
    """
    if transport == "ipc":
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(call(driver.cuIpcOpenMemHandle, opened, flags, doing="opening the arena"))
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    try:
        allocation = call(
            driver.cuMemImportFromShareableHandle, fd, kind, doing="opening the arena"
        )
    finally:
        os.close(fd)
    try:
        return _map(allocation, nbytes, index)
    finally:
        call(driver.cuMemRelease, allocation, doing="releasing a handle")


def _handle_bytes(handle: driver.CUipcMemHandle) -> bytes:
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def _map(allocation: object, nbytes: int, index: int) -> int:
    address = call(
        driver.cuMemAddressReserve, nbytes, GRANULE_BYTES, 0, 0, doing="reserving addresses"
    )
    with contextlib.ExitStack() as undone:
        undone.callback(_free_addresses, address, nbytes)
        call(driver.cuMemMap, address, nbytes, 0, allocation, 0, doing="mapping an arena")
        undone.callback(_unmap, address, nbytes)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        opening = "opening an arena to access"
        call(driver.cuMemSetAccess, address, nbytes, [access], 1, doing=opening)
        undone.pop_all()  # it is mapped, and stays so
    return int(address)


def _unmap(address: object, nbytes: int) -> None:
    call(driver.cuMemUnmap, address, nbytes, doing="unmapping an arena")


def _free_addresses(address: object, nbytes: int) -> None:
    call(driver.cuMemAddressFree, address, nbytes, doing="releasing addresses")


class _Bytes:
    """Memory as torch takes it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


def bytes_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 tensor over device memory, without a copy."""
    tensor = torch.as_tensor(_Bytes(address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError("torch copied the arena instead of mapping it")
    return tensor
