"""Symbolic tensors for libraries that take tensors through DLPack: their addresses are symbolic."""

from __future__ import annotations

import ctypes

import torch

_FLOAT, _INT, _UINT, _BFLOAT, _BOOL = 2, 0, 1, 4, 6
_CODES: dict[torch.dtype, int] = {
    torch.bfloat16: _BFLOAT,
    torch.bool: _BOOL,
    torch.uint8: _UINT,
    torch.uint16: _UINT,
    torch.uint32: _UINT,
    torch.uint64: _UINT,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 12,
}
CUDA_DEVICE = (2, 0)  # kDLCUDA, and its index


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h. Without a deleter its memory is not its reader's to free."""

    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_kept: list[object] = []  # a child that traces lives for one candidate
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(tensor: torch.Tensor) -> object:
    """A capsule of a tensor on the GPU, as `__dlpack__` gives one."""
    rank = tensor.dim()
    shape = (ctypes.c_int64 * max(1, rank))(*tensor.shape)
    strides = (ctypes.c_int64 * max(1, rank))(*tensor.stride())
    code = _CODES.get(tensor.dtype, _FLOAT if tensor.dtype.is_floating_point else _INT)
    managed = _Managed(
        _Tensor(
            tensor.data_ptr(),
            *CUDA_DEVICE,
            rank,
            code,
            8 * tensor.element_size(),
            1,
            ctypes.addressof(shape),
            ctypes.addressof(strides),
            0,
        ),
        None,
        None,
    )
    _kept.append((managed, shape, strides))
    made: object = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return made


class SymbolicExport:
    """A symbolic tensor's DLPack interface, for what would treat a `torch.Tensor` by other ways."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_options: object) -> object:
        return capsule(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE
