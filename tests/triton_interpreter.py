"""Triton kernels on the CPU: jax_triton.triton_call by Triton's own interpreter, which jax-triton does not reach.

It runs the kernel's Python on NumPy arrays, program by program: what a kernel computes, not how it is compiled. Its
products are of float16 and float32 alone (bfloat16 it multiplies as the integers that hold the bits).
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

TRITON_NAMES = {"float16": "fp16", "float32": "fp32", "int32": "i32"}
ALIGNMENT = 16  # bytes, as the interpreter demands of a descriptor's array


def interpret(monkeypatch: pytest.MonkeyPatch, package: ModuleType, name: str) -> None:
    """Puts the module of kernels that the package has under this name, interpreted, in its place."""
    import jax_triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # Triton's own library was decorated before: interpreted where a kernel calls it.
    monkeypatch.setattr(
        JITFunction, "__call__", lambda self, *args, **named: InterpretedFunction(self.fn)(*args, **named)
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a function is decorated
    spec = importlib.util.find_spec(f"{package.__name__}.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(package, name, module, raising=False)
    monkeypatch.setattr(jax_triton, "triton_call", triton_call)


def triton_call(*operands: Any, kernel: Any, out_type: Any, grid: tuple[int, ...], **options: Any) -> Any:
    from jax_triton import TensorDescriptor

    def run(*arrays: jax.Array) -> tuple[np.ndarray, ...]:
        given = [argument(operand, array) for operand, array in zip(operands, arrays, strict=True)]
        # Not a number, so that what no program writes is seen.
        outs = [aligned(np.full(out.shape, np.nan, out.dtype)) for out in out_type]
        with interpreted_language():
            kernel[grid](*given, *map(Memory, outs), **options)
        return tuple(outs)

    arrays = [operand.base if isinstance(operand, TensorDescriptor) else operand for operand in operands]
    return jax.pure_callback(run, out_type, *arrays)


@contextlib.contextmanager
def interpreted_language() -> Iterator[None]:
    """Takes back what the interpreter makes of triton.language, in the order that it does not keep itself: each
    function that a kernel calls changes it once more, for good. What is compiled later would find it changed."""
    from triton.runtime import interpreter

    patches, patch = [], interpreter._patch_lang

    def recorded(function: Any) -> SimpleNamespace:
        patches.append(patch(function))
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", recorded)
        yield
    for each in reversed(patches):
        each.restore()


def argument(operand: Any, array: jax.Array) -> Any:
    from jax_triton import TensorDescriptor
    from triton.tools import tensor_descriptor

    memory = Memory(aligned(np.asarray(array)))
    if not isinstance(operand, TensorDescriptor):
        return memory
    for stride in operand.strides[:-1]:
        assert stride * memory.dtype.itemsize % ALIGNMENT == 0
    return tensor_descriptor.TensorDescriptor(
        memory, list(operand.shape), list(operand.strides), list(operand.block_shape)
    )


def aligned(array: np.ndarray) -> np.ndarray:
    buffer = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Dtype(str):
    itemsize: int


class Memory:
    """An array, as far as the interpreter asks a tensor of torch about itself; it is on the host already."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = Dtype(TRITON_NAMES[array.dtype.name])
        self.dtype.itemsize = array.dtype.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Memory":
        return self

    def cpu(self) -> "Memory":
        return self

    def copy_(self, other: "Memory") -> None: ...

    def new_empty(self, *arguments: Any, **options: Any) -> "Memory":
        return Memory(self.array)

    def set_(self, *arguments: Any) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> None: ...
