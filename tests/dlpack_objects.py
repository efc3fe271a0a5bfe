"""DLPack objects made by hand, every field of whose capsules is what a test wants it to be."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
FP32, FP16, INT32 = (2, 32, 1), (2, 16, 1), (0, 32, 1)
READ_ONLY, IS_COPIED = 1, 2


class DLTensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("device_type", c.c_int32),
        ("device_id", c.c_int32),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


class Managed(c.Structure):
    """DLManagedTensorVersioned."""


class Unversioned(c.Structure):
    """DLManagedTensor, before DLPack 1.0."""


DELETER = c.CFUNCTYPE(None, c.POINTER(Managed))
Managed._fields_ = [
    ("major", c.c_uint32),
    ("minor", c.c_uint32),
    ("context", c.c_void_p),
    ("deleter", DELETER),
    ("flags", c.c_uint64),
    ("tensor", DLTensor),
]
OLD_DELETER = c.CFUNCTYPE(None, c.POINTER(Unversioned))
Unversioned._fields_ = [
    ("tensor", DLTensor),
    ("context", c.c_void_p),
    ("deleter", OLD_DELETER),
]

_DESTRUCTOR = c.PYFUNCTYPE(None, c.c_void_p)
_NEW_NAME, _OLD_NAME = b"dltensor_versioned", b"dltensor"
# Functions of their own: those that are attributes of c.pythonapi are everybody's.
_new_capsule = c.PYFUNCTYPE(c.py_object, c.c_void_p, c.c_char_p, _DESTRUCTOR)(
    ("PyCapsule_New", c.pythonapi)
)
_pointer_of = c.PYFUNCTYPE(c.c_void_p, c.c_void_p, c.c_char_p)(
    ("PyCapsule_GetPointer", c.pythonapi)
)
_is_named = c.PYFUNCTYPE(c.c_int, c.c_void_p, c.c_char_p)(("PyCapsule_IsValid", c.pythonapi))

_alive: dict[int, tuple[Any, HandMade]] = {}  # by address: the struct, and whose it is


@DELETER
def _delete(managed: Any) -> None:
    _forget(c.addressof(managed.contents))


@OLD_DELETER
def _delete_old(managed: Any) -> None:
    _forget(c.addressof(managed.contents))


def _forget(address: int) -> None:
    _, owner = _alive.pop(address)  # a second time there is none
    owner.deleted += 1


@_DESTRUCTOR
def _drop(capsule: int) -> None:
    """The destructor of a capsule, whose name has changed if somebody took the tensor from it."""
    if _is_named(capsule, _NEW_NAME):
        _forget(_pointer_of(capsule, _NEW_NAME))


@_DESTRUCTOR
def _drop_old(capsule: int) -> None:
    if _is_named(capsule, _OLD_NAME):
        _forget(_pointer_of(capsule, _OLD_NAME))


class HandMade:
    """An object with DLPack's two methods. It counts the tensors that it gave away and those that
    came back, and keeps the streams that it was told of."""

    def __init__(
        self,
        data: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        dtype: tuple[int, int, int] = FP32,
        device: tuple[int, int] = (CPU, 0),
        byte_offset: int = 0,
        versioned: bool = True,
        flags: int = 0,
        keeps: Any = None,
        answer: Callable[[], Any] | None = None,
        version: tuple[int, int] = (1, 0),
    ) -> None:
        """strides in elements. Only a `versioned` one takes a consumer's max_version. What answer()
        returns is given in place of a capsule. A `version` other than 1.0 is that of every capsule,
        whatever is asked for."""
        self.data, self.dtype, self.device = data, dtype, device
        self._shape = (c.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (c.c_int64 * len(strides))(*strides)
        self.byte_offset, self.versioned, self.flags, self.keeps = (
            byte_offset, versioned, flags, keeps
        )  # fmt: skip
        self.answer, self.version = answer, version
        self.exported = self.deleted = 0
        self.streams: list[Any] = []

    @classmethod
    def of(cls, array: np.ndarray, **fields: Any) -> HandMade:
        """The memory of a NumPy array of fp16, fp32 or int32."""
        dtype = (0 if array.dtype.kind == "i" else 2, 8 * array.itemsize, 1)
        made: dict[str, Any] = {
            "data": array.ctypes.data,
            "shape": array.shape,
            "strides": tuple(step // array.itemsize for step in array.strides),
            "dtype": dtype,
            "keeps": array,
        }
        return cls(**made | fields)

    @property
    def balanced(self) -> bool:
        """Whether every tensor that was given away came back once."""
        return self.exported == self.deleted

    def _tensor(self) -> DLTensor:
        return DLTensor(
            self.data, *self.device, len(self._shape), *self.dtype, self._shape,
            self._strides, self.byte_offset,
        )  # fmt: skip

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        if self.answer is not None:
            return self.answer()
        if not self.versioned and options:
            raise TypeError(f"unexpected arguments: {', '.join(options)}")
        if self.flags & READ_ONLY and options.get("max_version") is None:
            raise BufferError("a read-only tensor has no old capsule")
        made: Any
        if options.get("max_version") is not None or self.version != (1, 0):
            made = Managed(*self.version, None, _delete, self.flags, self._tensor())
            name, drop = _NEW_NAME, _drop
        else:
            made = Unversioned(self._tensor(), None, _delete_old)
            name, drop = _OLD_NAME, _drop_old
        _alive[c.addressof(made)] = (made, self)
        self.exported += 1
        return _new_capsule(c.addressof(made), name, drop)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
