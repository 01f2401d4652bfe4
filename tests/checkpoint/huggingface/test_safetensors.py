"""Files with invalid headers and incomplete folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxopt_llm.checkpoint.huggingface import model_folder, safetensors
from jaxopt_llm.checkpoint.huggingface.safetensors import NewFolder, TensorSpec
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.tokenizer import JsonTokenizer

pytestmark = pytest.mark.core

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float32).astype(jnp.bfloat16),
    "c": np.zeros((0, 3), np.float16),
    "d": np.array(1.5, np.float16),
}


def write_arrays(folder: Path, max_file_bytes: int = 10**9) -> Path:
    specs = {name: TensorSpec(array.dtype, array.shape) for name, array in ARRAYS.items()}
    safetensors.write_folder(folder, specs, ARRAYS.__getitem__, max_file_bytes)
    return folder


@pytest.mark.parametrize(("max_file_bytes", "files"), [(10**9, 1), (24, 2), (1, 4)])
def test_written_tensors_are_read_back(max_file_bytes: int, files: int, tmp_path: Path) -> None:
    write_arrays(tmp_path, max_file_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    found = safetensors.open_folder(tmp_path)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].array.dtype == array.dtype
        np.testing.assert_array_equal(found[name].array, array)


def write_header(folder: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry()}, b"\0" * 7, "truncated: tensor 'x' ends at byte 8 of 7"),
        ({"x": entry()}, b"\0" * 9, "1 bytes after the last tensor"),
        ({"x": entry(), "y": entry()}, b"\0" * 8, "tensor 'y' begins at byte 0 instead of 8"),
        ({"x": entry(data_offsets=[4, 12])}, b"\0" * 12, "tensor 'x' begins at byte 4 instead of 0"),
        ({"x": entry(shape=[3])}, b"\0" * 8, "tensor 'x' of shape [3] has 8 bytes"),
        ({"x": entry(shape=[-2])}, b"\0" * 8, "damaged: invalid header entry for tensor 'x'"),
        ({"x": entry(shape=[True, 2])}, b"\0" * 8, "damaged: invalid header entry for tensor 'x'"),
        ({"x": entry(shape=[1] * 64 + [2])}, b"\0" * 8, "tensor 'x' has an impossible shape"),
        ({"x": entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0])}, b"", "tensor 'x' has an impossible shape"),
        ({"x": entry(data_offsets=[8, 0])}, b"\0" * 8, "has -8 bytes"),
        ({"x": entry(data_offsets=[0])}, b"\0" * 8, "damaged: invalid header entry for tensor 'x'"),
        ({"x": "../secret"}, b"\0" * 8, "damaged: invalid header entry for tensor 'x'"),
        ({"x": entry(dtype="I16", shape=[4])}, b"\0" * 8, "tensor 'x' is I16, not one of F32, F16, BF16"),
        (b'{"x": 1, "x": 2}', b"", "'x' appears twice"),
        (b"[]", b"", "the JSON of the header is not an object"),
        (b"\xff\xfe{}", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "nested more than 100 deep"),
        (b"9" * 10_000, b"", "not valid JSON"),
    ],
)
def test_damaged_header_is_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    file = write_header(tmp_path, header, data)
    with pytest.raises(InputError) as error:
        safetensors.open_folder(tmp_path)
    assert str(file) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, (2**62).to_bytes(8, "little") + b"{}", b"\xff" * 8 + b"{}"])
def test_a_header_longer_than_its_file_is_not_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="model.safetensors: damaged: header of .* bytes in a file of"):
        safetensors.open_folder(tmp_path)


def test_header_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_header(tmp_path, {"x": entry()})
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 20)
    with pytest.raises(InputError, match="damaged: header of"):
        safetensors.open_folder(tmp_path)


def test_one_file_is_taken_before_the_shards_of_an_index(tmp_path: Path) -> None:
    write_arrays(tmp_path, 24)
    index = (tmp_path / safetensors.INDEX).read_text()
    first = min(tmp_path.glob("model-*"))
    write_arrays(tmp_path)
    assert {each.file.name for each in safetensors.open_folder(tmp_path).values()} == {safetensors.SINGLE}
    first.unlink()
    (tmp_path / safetensors.INDEX).write_text("damaged")
    assert safetensors.open_folder(tmp_path).keys() == ARRAYS.keys()
    (tmp_path / safetensors.SINGLE).unlink()
    with pytest.raises(InputError, match="invalid JSON"):
        safetensors.open_folder(tmp_path)
    (tmp_path / safetensors.INDEX).write_text(index)
    with pytest.raises(InputError, match=f"{first.name}: no such file, but {safetensors.INDEX} names it"):
        safetensors.open_folder(tmp_path)


def test_config_json_may_name_the_file_and_a_variant_is_not_taken_by_itself(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    (tmp_path / safetensors.SINGLE).rename(tmp_path / "model.fp16.safetensors")
    with pytest.raises(InputError, match=r"only the variant model.fp16.safetensors, .* rename it to model.safetensors"):
        safetensors.open_folder(tmp_path)
    assert safetensors.open_folder(tmp_path, "model.fp16.safetensors").keys() == ARRAYS.keys()
    with pytest.raises(InputError, match=r"no other.safetensors, which transformers_weights of config.json names"):
        safetensors.open_folder(tmp_path, "other.safetensors")
    with pytest.raises(InputError, match=r"transformers_weights='../x.safetensors' is not a plain"):
        safetensors.open_folder(tmp_path, "../x.safetensors")
    settings = {"model_type": "llama", "transformers_weights": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError):
        model_folder.open_model_folder(tmp_path)


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = folder / safetensors.INDEX
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "pytorch_model.bin",
        "",
        3,
        "x\n.safetensors",
    ],
)
def test_an_index_names_plain_files_only(name: Any, tmp_path: Path) -> None:
    write_arrays(tmp_path, 24)
    change_index(tmp_path, lambda index: index["weight_map"].update(a=name))
    with pytest.raises(InputError, match=r"index.json: tensor 'a' is in .*, which is not a plain"):
        safetensors.open_folder(tmp_path)


def test_an_index_and_its_files_have_the_same_tensors(tmp_path: Path) -> None:
    write_arrays(tmp_path, 24)
    first, second = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    change_index(tmp_path, lambda index: index["weight_map"].update(x=first))
    with pytest.raises(InputError, match=f"{first}: tensor 'x' of model.safetensors.index.json is missing"):
        safetensors.open_folder(tmp_path)
    change_index(tmp_path, lambda index: index["weight_map"].update(a=second))
    with pytest.raises(InputError, match=f"{second}: tensor '[ax]' of .* is missing"):
        safetensors.open_folder(tmp_path)
    change_index(tmp_path, lambda index: index.update(weight_map={"a": first, "b": second, "d": second}))
    with pytest.raises(InputError, match=f"{second}: tensor 'c' is not in model.safetensors.index.json"):
        safetensors.open_folder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path, 24)
    first, second = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    with pytest.raises(InputError, match=f"{second}: tensor 'a' is also in {first}"):
        safetensors.open_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "it has no weights"),
        (("pytorch_model.bin",), "are pickles, which can run code and are not opened; .* python -c .*save_pretrained"),
        (("consolidated.00.pth",), "only consolidated.00.pth; name a folder of the same model in the layout of"),
        (
            ("consolidated-00001-of-00002.safetensors", "params.json"),
            "only consolidated-00001-of-00002.safetensors; name",
        ),
        (("m-Q4_K_M.gguf", "README.md"), "only m-Q4_K_M.gguf; name a folder of the same model in the layout of"),
        (("consolidated.00.pth", "model-00001-of-00002.safetensors"), "only parts of them; download the folder again"),
        (("consolidated.safetensors", "pytorch_model.bin"), "are pickles"),
        (("original/consolidated.00.pth",), "only original; name a folder of the same model"),
        (("model-00001-of-00002.safetensors",), "only parts of them; download the folder again"),
    ],
)
def test_a_folder_without_weights_says_how_to_get_them(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=message):
        safetensors.open_folder(tmp_path)
    if "layout" in message:
        with pytest.raises(InputError, match=f"no config.json, {message}"):
            model_folder.read_settings(tmp_path)


def test_a_missing_file_and_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(InputError, match=f"a.bin: this is a file; name its folder, {tmp_path}"):
        model_folder.read_settings(tmp_path / "a.bin")
    with pytest.raises(InputError, match="no such folder; download the Hugging Face model first"):
        model_folder.read_settings(tmp_path / "meta-llama")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(InputError, match=r"adapter: adapters of PEFT, not a model; name their base .*org/base"):
        model_folder.read_settings(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(InputError, match="name their base model here, and the adapters with --adapter"):
        model_folder.read_settings(tmp_path / "adapter")
    (tmp_path / "adapter" / "config.json").write_text("{}")
    with pytest.raises(
        InputError, match="or move adapter_config.json elsewhere if the weights beside it are the model"
    ):
        model_folder.read_settings(tmp_path / "adapter")
    write_arrays(tmp_path, 24)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(InputError, match=f"{last.name}: no such file, but {safetensors.INDEX} names it; download"):
        safetensors.open_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    readers = {
        "config.json": model_folder.read_settings,
        "model.safetensors": safetensors.open_folder,
        "tokenizer.json": JsonTokenizer,
    }
    with pytest.raises(InputError, match=f"{name}: a pointer of Git LFS .* run git lfs pull in {tmp_path}"):
        readers[name](tmp_path)


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / ".new.partial").mkdir()  # left by a writer that was killed
    (tmp_path / ".new.partial" / "old").touch()
    with pytest.raises(RuntimeError), NewFolder(tmp_path / "new") as folder:
        (folder / "half").touch()
        assert not (tmp_path / "new").exists()
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with NewFolder(tmp_path / "new") as folder:
        (folder / "whole").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["whole"]
    with pytest.raises(InputError, match="already exists"):
        NewFolder(tmp_path / "new")


def test_a_link_to_an_empty_folder_keeps_pointing_there(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to("large")
    with NewFolder(tmp_path / "link") as folder:
        (folder / "whole").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large" / "whole").exists()
    with pytest.raises(InputError, match="already exists"):
        NewFolder(Path("/"))
