"""Triton kernels on the CPU: jax_triton.triton_call with Triton's own interpreter, which jax-triton does not support.

The interpreter runs the Python code of a kernel on NumPy arrays, program by program. It tests what a kernel computes,
not how it is compiled. Matmuls work only in float16 and float32; the interpreter multiplies bfloat16 values as the
integers that hold their bits.
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
ALIGNMENT = 16  # bytes, which the interpreter requires for the array of a descriptor


def interpret(monkeypatch: pytest.MonkeyPatch, package: ModuleType, name: str) -> None:
    """Replace the package's module of kernels with this name by an interpreted copy."""
    import jax_triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # Triton's own library is already decorated: interpret its functions when a kernel calls them.
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
        # NaN, so that elements that no program writes are noticed.
        outs = [aligned(np.full(out.shape, np.nan, out.dtype)) for out in out_type]
        with interpreted_language():
            kernel[grid](*given, *map(Memory, outs), **options)
        return tuple(outs)

    arrays = [operand.base if isinstance(operand, TensorDescriptor) else operand for operand in operands]
    return jax.pure_callback(run, out_type, *arrays)


@contextlib.contextmanager
def interpreted_language() -> Iterator[None]:
    """Undo the interpreter's patches of triton.language, in reverse order.

    The interpreter patches it again, permanently, for each function that a kernel calls, and does not keep the order of
    the patches. Without this, kernels compiled later would use the patched language.
    """
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
    """Array with the methods of a torch tensor that the interpreter calls. It is already on the host."""

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
