"""Folders of safetensors files: read by memory map, a slice at a time, and written a tensor at a time.

What a file says of itself is checked before any of it is used: names are keys and never paths, and an index can name
files of its own folder alone. No pickle is ever opened.
"""

import json
import math
import mmap
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxopt_llm.errors import InputError
from jaxopt_llm.files import sync_directory

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
MASKS = {"BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8)}  # of older GPT-2 folders, beside the parameters
MOST_HEADER = 100_000_000  # bytes; what the format's own library takes
MOST_FILE = 5_000_000_000  # bytes of tensors in a file that is written; a larger tensor has one to itself
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Stored(NamedTuple):
    """A tensor in a file: a view of the memory map, of which only what is sliced is read."""

    file: Path
    array: np.ndarray
    map: mmap.mmap

    def release(self) -> None:
        """What was read of the file no longer counts as this process's memory; it can be read again."""
        self.map.madvise(mmap.MADV_DONTNEED)


class Described(NamedTuple):
    """A tensor to be written."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


# --- reading


def open_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name. Raises InputError for what is no whole folder of safetensors."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; download the model first, as in: hf download NAME --local-dir DIR")
    index = folder / INDEX
    if index.is_file():
        return _open_shards(folder, _read_index(index))
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        raise InputError(f"{folder}: neither {SINGLE} nor {INDEX} is there, only parts; download the folder again")
    if any(name.endswith(PICKLES) for name in names):
        code = (
            "import sys; from transformers import AutoModelForCausalLM as M; "
            "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])"
        )
        paths = f"{shlex.quote(str(folder))} {shlex.quote(f'{folder}-safetensors')}"
        raise InputError(
            f"{folder}: its weights are pickles, which can run code and are not opened; if you trust them, convert "
            f'them: python -c "{code}" {paths}'
        )
    raise InputError(f"{folder}: it holds no weights: neither {SINGLE} nor {INDEX} is there")


def open_file(file: Path) -> dict[str, Stored]:
    """The tensors of one file by name."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MOST_HEADER, size - 8):
                raise InputError(f"{file}: its header says {length:,} bytes, the file has {size:,}: it is damaged")
            header = parse_json(stream.read(length), file)
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    data = np.frombuffer(mapped, np.uint8)[8 + length :]
    header.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        if end > data.size:
            raise InputError(f"{file}: tensor {name!r} ends at byte {end:,} of {data.size:,}: the file is truncated")
        ranges.append((begin, end, name))
        try:
            array = data[begin:end].view(dtype).reshape(shape)
        except ValueError as error:  # more dimensions than NumPy has, or sizes beside a 0 that it cannot multiply
            raise InputError(f"{file}: tensor {name!r} has a shape that no array has: it is damaged") from error
        tensors[name] = Stored(file, array, mapped)
    at = 0
    for begin, end, name in sorted(ranges):
        if begin != at:
            raise InputError(f"{file}: tensor {name!r} begins at byte {begin:,}, not at {at:,}: the file is damaged")
        at = end
    if at != data.size:
        raise InputError(f"{file}: {data.size - at:,} bytes after the last tensor: the file is damaged")
    return tensors


def _entry(file: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """dtype, shape, first byte and the byte after the last."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**63 for each in value)

    known = isinstance(entry, dict) and sizes(entry.get("shape")) and sizes(entry.get("data_offsets"))
    if not known or len(entry["data_offsets"]) != 2 or not isinstance(entry.get("dtype"), str):
        raise InputError(f"{file}: the header's entry for tensor {name!r} is damaged")
    dtype = (FLOATS | MASKS).get(entry["dtype"])
    if dtype is None:
        raise not_float(file, name, entry["dtype"])
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{file}: tensor {name!r} of shape {list(shape)} has {end - begin:,} bytes: it is damaged")
    return dtype, shape, begin, end


def not_float(file: Path, name: str, dtype: str) -> InputError:
    floats = ", ".join(FLOATS)
    return InputError(
        f"{file}: tensor {name!r} is {dtype}, not one of {floats}: bring the folder of the unquantised model"
    )


def _open_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        for name, stored in open_file(folder / shard).items():
            if name in found:
                raise InputError(f"{stored.file}: tensor {name!r} is in {found[name].file.name}, too")
            found[name] = stored
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise InputError(f"{folder / shard}: tensor {name!r} is not in it, as {INDEX} says")
    for name in found.keys() - weight_map.keys():
        raise InputError(f"{found[name].file}: tensor {name!r} is not in {INDEX}")
    return found


def _read_index(index: Path) -> dict[str, str]:
    weight_map = parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: it has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise InputError(f"{index}: tensor {name!r} is said to be in {shard!r}, not a plain *.safetensors name")
    return weight_map


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """An object without duplicate keys. Raises InputError that names the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise InputError(f"{file}: {next(name for name in names if names.count(name) > 1)!r} is there twice")
        return found

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: no JSON where it should be ({type(error).__name__}: {error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: no JSON object")
    return value


# --- writing


def write_folder(
    folder: Path, tensors: Mapping[str, Described], get: Callable[[str], np.ndarray], most: int = MOST_FILE
) -> None:
    """Writes tensors into an existing folder, one after the other, in files of at most `most` bytes of them."""
    shards: list[dict[str, Described]] = [{}]
    room = most
    for name, each in tensors.items():
        if each.size > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][name] = each
        room -= each.size
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0], get)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, shard, get)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(each.size for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: Mapping[str, Described], get: Callable[[str], np.ndarray]) -> None:
    """Writes tensors into one file, one after the other."""
    code = {dtype: name for name, dtype in (FLOATS | MASKS).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, each in tensors.items():
        header[name] = {"dtype": code[each.dtype], "shape": each.shape, "data_offsets": [at, at + each.size]}
        at += each.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, each in tensors.items():
            array = np.asarray(get(name), order="C")
            assert (array.dtype, array.shape) == each, (name, array.dtype, array.shape, each)
            stream.write(array.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def check_free(path: Path) -> None:
    """Raises InputError where something is already, but an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path}: there is something already; name a folder that is not there yet")


class NewFolder:
    """A folder that appears whole or not at all, at a place where nothing is. A context manager: it gives the folder
    to write into."""

    def __init__(self, path: Path) -> None:
        check_free(path)
        self.path = path.resolve()  # a link keeps pointing there: no folder can take its place
        self._working = self.path.with_name(f".{self.path.name}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self._working, ignore_errors=True)  # of a writer that was killed
        self._working.mkdir(parents=True)
        return self._working

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            sync_directory(self._working)
            self._working.replace(self.path)  # an empty folder there gives way
            sync_directory(self.path.parent)
        else:
            shutil.rmtree(self._working, ignore_errors=True)
