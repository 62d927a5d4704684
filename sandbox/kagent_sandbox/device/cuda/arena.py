"""Device memory that the judge owns and launchers map."""

from __future__ import annotations

import torch

from kagent_sandbox.data.plan import TensorRef
from kagent_sandbox.device.cuda.driver import GpuError
from kagent_sandbox.device.cuda.memory import Transport, allocate, bytes_tensor
from kagent_sandbox.device.plan_ops import as_words, strided_view
from kagent_sandbox.errors import DeviceError, DeviceFull


class GpuArena:
    """Device memory that the judge owns and launchers map."""

    def __init__(self, nbytes: int, index: int, transport: Transport) -> None:
        try:
            self.shared = allocate(nbytes, index, transport)
        except GpuError as e:
            if e.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise DeviceError(str(e)) from None
            torch.cuda.empty_cache()  # torch holds on to what references have used
            try:
                self.shared = allocate(nbytes, index, transport)
            except GpuError as again:
                raise DeviceFull(str(again)) from None
        self.nbytes = self.shared.nbytes
        device = torch.device("cuda", index)
        self._bytes = bytes_tensor(self.shared.address, self.nbytes, device)

    def view(self, tensor: TensorRef, base: int) -> torch.Tensor:
        """The judge's own view of a plan's tensor whose buffer starts at byte `base`."""
        return strided_view(self._bytes, tensor, base)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 view of a range of bytes."""
        return self._bytes[start:stop]

    def words(self, nbytes: int) -> torch.Tensor:
        """All of it as integers of 1, 2, 4 or 8 bytes."""
        return as_words(self._bytes, nbytes)

    def close(self) -> None:
        """Give the memory back; no view may be used afterwards."""
        torch.cuda.synchronize(self._bytes.device)
        self.shared.close()
