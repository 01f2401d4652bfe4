"""Folders of safetensors files, read in slices and written one tensor at a time.

Headers are checked before anything is used. Tensor names are keys and never paths, and an index can name only files of
its own folder. Pickles are never opened.

A process that touches a mapped page of a file that has been cut, or whose disk fails, ends with SIGBUS. Bytes are
therefore read with `pread`, whose failure is an error that names the file. The map only gives views an address.
"""

import json
import math
import mmap
import os
import re
import shlex
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import check_is_no_pointer, sync_directory, sync_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOAT_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
# Codes of weights, their scales and zero-points, and positions: see quantised/.
CODE_DTYPES = {
    **{"F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E8M0": np.dtype(jnp.float8_e8m0fnu)},
    **{"I8": np.dtype(np.int8), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)},
}
# Older GPT-2 folders contain masks in addition to the parameters.
MASK_DTYPES = {"BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8)}
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
MAX_FILE_BYTES = 5_000_000_000  # default limit for the tensors of one written file; a larger tensor has its own file
OTHER_LAYOUT = re.compile(r"consolidated\b.*|.*\.gguf|original")  # names of files and folders
NAME_LAYOUT = "name a folder of the same model in the layout of transformers"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor to write."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


MAX_GAP_BYTES = 2**14  # mean bytes between parts of a view that are read, too: a call for each part would take longer
MAX_PIECE_BYTES = 2**20  # read at once of a view with gaps


class StoredFile:
    """File that is open, with the addresses of its bytes."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._descriptor = os.dup(stream.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.bytes = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def read(self, view: np.ndarray) -> np.ndarray:
        """Return a view of the file's bytes, of any dtype, shape and strides, as an array in memory.

        Its axes lie in memory as they do in the file.

        Raises:
            InputError: the file was cut, or cannot be read any more.
        """
        order = sorted(range(view.ndim), key=lambda axis: view.strides[axis], reverse=True)
        there = view.transpose(order)
        found = np.empty(there.shape, view.dtype)
        if found.size:
            begin = _address(view) - _address(self.bytes)
            assert 0 <= begin < self.bytes.size and min(view.strides, default=0) >= 0, "not a view of this file"
            self._fill(found, begin, there.strides)
        return found.transpose(np.argsort(order))

    def _fill(self, out: np.ndarray, begin: int, strides: tuple[int, ...]) -> None:
        """Read values into a contiguous array.

        Args:
            out: the array, which is not empty.
            begin: byte of the first value in the file.
            strides: bytes between neighbouring values in the file, for each axis; the largest comes first.
        """
        run, extent = out.itemsize, out.itemsize  # bytes that lie together; bytes up to the end of the last value
        for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
            run *= size if stride == run or size == 1 else 1
            extent += (size - 1) * stride
        gaps = extent - out.nbytes
        if not gaps:
            self._read(out.reshape(-1).view(np.uint8), begin)
        elif extent <= MAX_PIECE_BYTES and gaps <= MAX_GAP_BYTES * (out.nbytes // run - 1):
            piece = np.empty(extent, np.uint8)
            self._read(piece, begin)
            out[...] = np.ndarray(out.shape, out.dtype, piece.data, 0, strides)
        elif len(out) == 1:
            self._fill(out[0], begin, strides[1:])
        else:
            half = len(out) // 2
            self._fill(out[:half], begin, strides)
            self._fill(out[half:], begin + half * strides[0], strides)

    def _read(self, out: np.ndarray, begin: int) -> None:
        """Fill contiguous bytes from the file."""
        left = out.data
        try:
            while left:  # one call reads at most 2 GiB
                count = os.preadv(self._descriptor, [left], begin)
                if not count:
                    raise InputError(f"{self.path}: the file was truncated while it was read; download it again")
                left, begin = left[count:], begin + count
        except OSError as error:
            raise InputError(
                f"{self.path}: the file can no longer be read ({error.strerror}); check the disk, or download it again"
            ) from error


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Decoder(Protocol):
    """Weight that is stored as codes: see quantised/codes.py."""

    dtype: np.dtype

    def read(self, view: np.ndarray) -> np.ndarray:
        """Return the values at the places of a view."""


class StoredTensor(NamedTuple):
    """Tensor in a file.

    array: a view that gives its dtype, its shape and its place; see `read`. decoder: for a weight that is stored as
        codes; `array` has its shape, and no data.
    """

    source: StoredFile
    array: np.ndarray
    decoder: Decoder | None = None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a parameter with these values."""
        return self.array.dtype if self.decoder is None else self.decoder.dtype

    @property
    def file(self) -> Path:
        return self.source.path

    def read(self, view: np.ndarray | None = None) -> np.ndarray:
        """Read a view of `array`, or all of it: see `StoredFile.read`."""
        view = self.array if view is None else view
        return self.source.read(view) if self.decoder is None else self.decoder.read(view)


# --- reading


def open_folder(folder: Path, chosen: str | None = None) -> dict[str, StoredTensor]:
    """Open the tensors of a folder, by name.

    The files are those that transformers takes: the one that config.json names, else model.safetensors, else the shards
    of the index. Other files with weights are not read.

    Args:
        folder: the folder.
        chosen: name of the file or of the index that config.json names (`transformers_weights`); None: it names none.

    Raises:
        InputError: the folder is incomplete or has no safetensors files.
    """
    if chosen is not None:
        _check_chosen(folder, chosen)
    name = chosen or next((each for each in (SINGLE, INDEX) if (folder / each).is_file()), None)
    if name is None:
        raise _explain_missing(folder)
    return _open_shards(folder, _read_index(folder / name)) if name.endswith(".json") else open_file(folder / name)


def find_other_layout(folder: Path) -> str | None:
    """Return the name of weights of a folder in the layout of other programs: of the authors', or of llama.cpp."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return next(filter(OTHER_LAYOUT.fullmatch, names), None)


def _explain_missing(folder: Path) -> InputError:
    """Return the error for a folder without the files that transformers takes."""
    names = sorted(path.name for path in folder.iterdir() if not OTHER_LAYOUT.fullmatch(path.name))
    if variants := [name for name in names if re.fullmatch(r"model\.[^.]+\.safetensors", name)]:
        return InputError(
            f"{folder}: no {SINGLE} and no {INDEX}, only the variant {variants[0]}, which is not taken by itself; "
            f"rename it to {SINGLE} if it is the one that you want"
        )
    if any(name.endswith(".safetensors") for name in names):
        return InputError(f"{folder}: no {SINGLE} and no {INDEX}, only parts of them; download the folder again")
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        code = (
            "import sys; from transformers import AutoModelForCausalLM as M; "
            "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2])"
        )
        return pickle_error(folder, code, str(folder), f"{folder}-safetensors")
    if other := find_other_layout(folder):
        return InputError(f"{folder}: no {SINGLE} and no {INDEX}, only {other}; {NAME_LAYOUT}")
    return InputError(f"{folder}: it has no weights, neither {SINGLE} nor {INDEX}; download the model again")


def _check_chosen(folder: Path, name: str) -> None:
    """Raise InputError unless the file or the index that config.json names is a file of the folder."""
    if not re.fullmatch(r"[\w.-]+\.safetensors(\.index\.json)?", name):
        raise InputError(
            f"{folder / 'config.json'}: transformers_weights={name!r} is not a plain *.safetensors file name; remove it"
        )
    if not (folder / name).is_file():
        raise InputError(
            f"{folder}: no {name}, which transformers_weights of config.json names; download the folder again"
        )


def pickle_error(folder: Path, code: str, *arguments: str) -> InputError:
    """Return the error for pickled weights. code: Python that converts them, given the arguments."""
    return InputError(
        f"{folder}: its weights are pickles, which can run code and are not opened; if you trust them, convert them to "
        f'safetensors: python -c "{code}" {shlex.join(arguments)}'
    )


def _damaged(file: Path, problem: str) -> InputError:
    return InputError(f"{file}: damaged: {problem}; download the file again")


def open_file(file: Path) -> dict[str, StoredTensor]:
    """Open the tensors of one file, by name.

    Raises:
        InputError: the file cannot be read, or its header is damaged.
    """
    try:
        size = file.stat().st_size
        check_is_no_pointer(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(file, f"header of {length:,} bytes in a file of {size:,} bytes")
            header = _parse_header(stream.read(length), file)
            source = StoredFile(file, stream)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    data = source.bytes[8 + length :]
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(file, name, entry) for name, entry in header.items()}
    tensors, expected_begin = {}, 0
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != expected_begin:
            raise _damaged(file, f"tensor {name!r} begins at byte {begin:,} instead of {expected_begin:,}")
        if end > data.size:
            raise _damaged(file, f"truncated: tensor {name!r} ends at byte {end:,} of {data.size:,}")
        try:
            array = data[begin:end].view(dtype).reshape(shape)
        except ValueError as error:
            # More dimensions than NumPy supports, or a 0 next to sizes with an overflowing product.
            raise _damaged(file, f"tensor {name!r} has an impossible shape") from error
        tensors[name], expected_begin = StoredTensor(source, array), end
    if expected_begin != data.size:
        raise _damaged(file, f"{data.size - expected_begin:,} bytes after the last tensor")
    return tensors


def _parse_header(content: bytes, file: Path) -> dict[str, Any]:
    try:
        header = json_files.parse_settings(content)
    except ValueError as error:
        raise _damaged(file, f"the header is not valid JSON ({one_line(error)})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "the JSON of the header is not an object")
    return header


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Return the dtype, the shape, the first byte and the byte after the last one."""

    def is_size_list(value: Any) -> bool:
        return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**63 for each in value)

    valid = isinstance(entry, dict) and is_size_list(entry.get("shape")) and is_size_list(entry.get("data_offsets"))
    if not valid or len(entry["data_offsets"]) != 2 or not isinstance(entry.get("dtype"), str):
        raise _damaged(file, f"invalid header entry for tensor {name!r}")
    dtype = (FLOAT_DTYPES | CODE_DTYPES | MASK_DTYPES).get(entry["dtype"])
    if dtype is None:
        raise _dtype_error(file, name, entry["dtype"])
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"tensor {name!r} of shape {list(shape)} has {end - begin:,} bytes")
    return dtype, shape, begin, end


def check_is_float(name: str, stored: StoredTensor) -> None:
    """Raise InputError for a tensor that does not hold floating-point numbers, as a parameter must."""
    if stored.dtype not in FLOAT_DTYPES.values():
        raise _dtype_error(stored.file, name, str(stored.array.dtype))


def _dtype_error(file: Path, name: str, dtype: str) -> InputError:
    supported = ", ".join(FLOAT_DTYPES)
    return InputError(f"{file}: tensor {name!r} is {dtype}, not one of {supported}; use the unquantised model")


def check_shape(name: str, stored: StoredTensor, shape: tuple[int, ...], requires: str, remedy: str) -> None:
    """Raise InputError if a tensor has another shape. requires: what requires the shape, and the verb."""
    if stored.array.shape != shape:
        found = f"{stored.file}: tensor {name!r} has shape {list(stored.array.shape)}"
        raise InputError(f"{found}, but {requires} {list(shape)}; {remedy}")


def _open_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            remedy = "download the folder again, or the index that belongs to its shards"
            raise InputError(f"{folder / shard}: no such file, but {INDEX} names it; {remedy}")
        for name, stored in open_file(folder / shard).items():
            if name in tensors:
                other = tensors[name].file.name
                raise InputError(f"{stored.file}: tensor {name!r} is also in {other}; download the folder again")
            tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise InputError(f"{folder / shard}: tensor {name!r} of {INDEX} is missing; download the folder again")
    for name in tensors.keys() - weight_map.keys():
        raise InputError(f"{tensors[name].file}: tensor {name!r} is not in {INDEX}; download the folder again")
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    weight_map = json_files.read_object(index, "download the file again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: it has no weight_map; download the file again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise InputError(f"{index}: tensor {name!r} is in {shard!r}, which is not a plain *.safetensors file name")
    return weight_map


def read_json(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """Read a JSON file of a folder. Raise InputError if it is missing or invalid. kind: what the folder holds."""
    if folder.is_file():
        raise InputError(f"{folder}: this is a file; name its folder, {folder.parent}")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; download the {kind} first: hf download NAME --local-dir DIR")
    if not (folder / name).is_file():
        raise InputError(f"{folder}: not a {kind} folder: it has no {name}; choose another folder")
    check_is_no_pointer(folder / name)
    return json_files.read_object(folder / name, f"download the {kind} again")


# --- writing


def write_folder(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    get_tensor: Callable[[str], np.ndarray],
    max_file_bytes: int,
    order: Iterable[str] | None = None,
) -> None:
    """Write tensors into an existing folder, one after the other.

    Args:
        folder: the folder.
        specs: the tensors to write, by name, in the order of the files.
        get_tensor: returns the tensor with a name.
        max_file_bytes: largest number of tensor bytes in one file; a larger tensor has its own file.
        order: names in the order in which tensors are requested and written; None for that of `specs`.
    """
    import huggingface_hub  # imported here, because only an export needs it

    plan = huggingface_hub.split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    files = {folder / file: {name: specs[name] for name in names} for file, names in plan.filename_to_tensors.items()}
    _write_files(files, get_tensor, order or specs)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, specs: Mapping[str, TensorSpec], get_tensor: Callable[[str], np.ndarray]) -> None:
    """Write tensors into one file, one after the other."""
    _write_files({file: specs}, get_tensor, specs)


def _write_files(
    files: Mapping[Path, Mapping[str, TensorSpec]], get_tensor: Callable[[str], np.ndarray], order: Iterable[str]
) -> None:
    places = {name: (file, begin, spec) for file, specs in files.items() for name, begin, spec in _start(file, specs)}
    for name in order:
        file, begin, spec = places[name]
        array = np.asarray(get_tensor(name), order="C")
        assert (array.dtype, array.shape) == spec, (name, array.dtype, array.shape, spec)
        with file.open("r+b") as stream:
            stream.seek(begin)
            stream.write(array.reshape(-1).view(np.uint8).data)
    for file in files:
        with file.open("r+b") as stream:
            sync_file(stream)


def _start(file: Path, specs: Mapping[str, TensorSpec]) -> list[tuple[str, int, TensorSpec]]:
    """Write the header of a file. Return (name, first byte in the file, spec) of each tensor."""
    codes = {dtype: name for name, dtype in (FLOAT_DTYPES | CODE_DTYPES | MASK_DTYPES).items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, spec in specs.items():
        end = begin + spec.nbytes
        header[name] = {"dtype": codes[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    file.write_bytes(content)
    return [(name, len(content) + header[name]["data_offsets"][0], spec) for name, spec in specs.items()]


def round_finite(array: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """Return an array in another dtype. Raise InputError, which names `what`, if a value is not finite there."""
    with np.errstate(over="ignore"):  # an overflow is reported below
        rounded = array.astype(dtype, copy=False)
    if not np.isfinite(rounded).all():
        raise InputError(f"{what} has values that are not finite in {dtype}; choose a wider --dtype")
    return rounded


def check_path_is_free(path: Path) -> None:
    """Raise InputError if the path exists and is not an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} already exists; choose a folder that does not exist yet")


class NewFolder:
    """New folder that appears at its path complete or not at all.

    A context manager: it returns a working folder to write into, and renames it to the path on success.
    """

    def __init__(self, path: Path) -> None:
        check_path_is_free(path)
        self.path = path.resolve()  # a link stays in place and keeps its target: no folder can replace a link
        self._working = self.path.with_name(f".{self.path.name}.partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self._working, ignore_errors=True)  # left by a writer that was killed
        self._working.mkdir(parents=True)
        return self._working

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            sync_directory(self._working)
            self._working.replace(self.path)  # replaces an empty folder
            sync_directory(self.path.parent)
        else:
            shutil.rmtree(self._working, ignore_errors=True)
