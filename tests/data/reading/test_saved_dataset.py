"""Arrow files, and the folders of `datasets.save_to_disk`: the same documents as in other formats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chats import CHATML
from corpora import prepare, read, some_documents, splits
from pyarrow import parquet
from test_conversation import write
from texts import write_arrow, write_jsonl, write_saved_dataset

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.files import find_files
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer

TEXTS = some_documents()


@pytest.fixture
def chats(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="chat", chat_template=str(tmp_path / "chat.jinja"))


def ids(path: Path, config: DataConfig) -> tuple[list[int], str]:
    """Return all tokens, and the line about fields that are not read."""
    stream, skipped = open_all_documents(DataConfig(**{**vars(config), "paths": (str(path),)}), load_tokenizer(config))
    return stream.read(0, stream.size).tolist(), skipped.describe_unread()


def found(path: Path, **settings: Any) -> list[str]:
    return [file.name for file in find_files(str(path), DataConfig(**settings))]


@pytest.mark.parametrize("kind", ["stream", "file", "folder"])
def test_the_texts_are_those_of_jsonl(kind: str, tmp_path: Path) -> None:
    config = DataConfig(held_out=0.3)
    expected = splits(read(write_jsonl(tmp_path / "expected.jsonl", TEXTS), config))
    if kind == "folder":
        path = write_saved_dataset(tmp_path / "saved", [TEXTS[:11], TEXTS[11:15], TEXTS[15:]])
    else:
        path = write_arrow(tmp_path / "a.arrow", TEXTS, stream=kind == "stream")
    assert splits(read(path, config)) == expected and len(expected[1]) > 3
    assert splits(read(prepare(tmp_path / "prepared", path, config), config)) == expected


def test_a_null_and_another_column(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", [*({"text": "x", "id": 1} for _ in range(9)), {"id": 1}, {"text": "y"}])
    config = DataConfig(paths=(str(path),), malformed="skip")
    skipped = open_all_documents(config, load_tokenizer(config))[1]
    assert skipped.describe() == [f"1 without text in column 'text' (first: {path}, row 10)"]
    assert skipped.describe_unread() == "fields not read: id (10 rows)"
    with pytest.raises(InputError, match=r"a.arrow: no column 'body' among \['text', 'id'\]"):
        ids(path, DataConfig(text_field="body"))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}


def chat_row(number: int, arguments: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": f"Add {number}"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": f"It is {number}"},
    ]
    return {"id": number, "messages": messages, "tools": [TOOL], "source": "s" if number % 2 else None}


def test_conversations_are_those_of_jsonl_and_parquet(chats: DataConfig, tmp_path: Path) -> None:
    rows = [chat_row(number, {"a": number, "b": 2}) for number in range(30)]
    expected = ids(write(tmp_path / "a.jsonl", rows), chats)
    unread = [f"id ({len(rows)} rows)", "tool_call_id of a message (30 rows)", "source (15 rows)"]
    assert expected[1].startswith("fields not read: ") and {*expected[1][17:].split(", ")} == {*unread}
    assert len(expected[0]) > 3000
    for path in (
        write(tmp_path / "a.parquet", rows),
        write_arrow(tmp_path / "a.arrow", rows),
        write_arrow(tmp_path / "b.arrow", rows, stream=False),
        write_saved_dataset(tmp_path / "saved", [rows[:20], rows[20:]]),
    ):
        assert ids(path, chats) == expected


def test_a_map_is_an_object(chats: DataConfig, tmp_path: Path) -> None:
    """Spark and DuckDB write objects with any keys so; Arrow returns the pairs of one as a list."""
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct({"name": pyarrow.string(), "arguments": texts})
    calls = pyarrow.list_(pyarrow.struct({"function": function}))
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": calls})

    def row(arguments: Any) -> dict[str, Any]:
        called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        return {"messages": [{"role": "user", "content": "Add"}, called]}

    def store(arguments: Any) -> Path:
        table = pyarrow.Table.from_pylist([row(arguments)], pyarrow.schema({"messages": pyarrow.list_(message)}))
        parquet.write_table(table, tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    expected = ids(write(tmp_path / "a.jsonl", [row({"x": "1", "y": "2"})]), chats)
    assert ids(store({"x": "1", "y": "2"}), chats) == expected
    with pytest.raises(InputError, match=r"a.parquet: the conversations cannot be read \(.*duplicate"):
        ids(store([("x", "1"), ("x", "2")]), chats)


@pytest.mark.parametrize("nested", ["messages", "tool_calls"])
@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_values_that_datasets_stores_as_json_text(suffix: str, nested: str, chats: DataConfig, tmp_path: Path) -> None:
    """`datasets` does so if the types of a value differ between rows."""
    rows = [chat_row(0, {"a": 1}), chat_row(1, {"a": "one", "b": [None, 2.5]}), chat_row(2, {})]
    expected = ids(write(tmp_path / "a.jsonl", rows), chats)
    messages = [message for row in rows for message in row["messages"]]

    def store(values: list[Any]) -> pyarrow.Array:
        texts = [None if value is None else json.dumps(value) for value in values]
        return pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), pyarrow.array(texts))

    if nested == "messages":
        flat = store(messages)
    else:
        names = ("role", "content", "tool_call_id")
        columns = [pyarrow.array([message.get(name) for message in messages], pyarrow.string()) for name in names]
        calls = store([message.get("tool_calls") for message in messages])
        flat = pyarrow.StructArray.from_arrays([*columns, calls], [*names, "tool_calls"])
    others = pyarrow.Table.from_pylist([{name: row[name] for name in ("id", "tools", "source")} for row in rows])
    table = others.append_column("messages", pyarrow.ListArray.from_arrays([0, 4, 8, 12], flat))
    path = tmp_path / f"b.{suffix}"
    if suffix == "arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, path)
    assert ids(path, chats) == expected


def test_only_the_files_that_the_folder_lists_are_read(tmp_path: Path) -> None:
    """Not the caches of `datasets`. The other Arrow files below a folder are read."""
    folder = write_saved_dataset(tmp_path / "all" / "saved", [["a"], ["b"]])
    write_arrow(tmp_path / "all" / "c.arrow", ["c"])
    shards = [f"data-0000{index}-of-00002.arrow" for index in range(2)]
    assert found(folder) == found(folder, format="arrow") == shards
    assert found(tmp_path / "all") == ["c.arrow", *(f"saved/{name}" for name in shards)]
    with pytest.raises(InputError, match="no file of the format jsonl"):
        found(folder, format="jsonl")
    (folder / shards[1]).unlink()
    with pytest.raises(InputError, match=f"{shards[1]}: listed in state.json, but there is no such file"):
        found(folder)
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}')
    with pytest.raises(InputError, match="saved: a selection of rows, saved by an old version of datasets"):
        found(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(InputError, match="state.json: invalid JSON .*; save the data set again"):
        found(folder)


def test_of_several_splits_train_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for split in ("train", "test"):
        write_saved_dataset(folder / split, [[split]])
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    name = "data-00000-of-00001.arrow"
    assert found(folder) == [f"train/{name}"] and found(folder / "test") == [name]
    assert found(tmp_path) == [f"saved/train/{name}"]
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(InputError, match="saved: has the splits test, validation, and no train; name the folder of a"):
        found(folder)
    shutil.rmtree(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert found(folder) == [f"test/{name}"]


PUBLISHED = {
    "beside each other": ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
    "in folders": ("plain/train/0000.parquet", "plain/validation/0000.parquet"),
    "of several tasks": ("train_sft.jsonl.gz", "eval_sft.jsonl.gz"),
    "without a name": ("chats.jsonl", "val.jsonl"),
    "in a cache": ("chats-train-00000-of-00002.arrow", "chats-test.arrow"),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_splits_of_a_published_folder_are_not_mixed(case: str, tmp_path: Path) -> None:
    """Nor is the card that lies beside the data a document."""
    for name in (*PUBLISHED[case], "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r": has files of the splits .*train.*by a glob, such as") as error:
        found(tmp_path)
    pattern = str(error.value).partition("such as ")[2].strip("'")
    assert [Path(pattern.partition("/**")[0], name).name for name in found(Path(pattern))] == [
        Path(PUBLISHED[case][0]).name
    ]
    (tmp_path / PUBLISHED[case][1]).unlink()
    assert found(tmp_path) == [PUBLISHED[case][0]]
    (tmp_path / PUBLISHED[case][0]).unlink()
    (tmp_path / "test.md").write_text("a page")
    assert found(tmp_path) == ["README.md", "test.md"]  # a folder of texts


@pytest.mark.parametrize("stream", [True, False])
def test_a_damaged_arrow_file(stream: bool, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["x" * 1000] * 30, stream)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(
            InputError, match=r"a.arrow: (not a readable Arrow file|column 'text' cannot be read)"
        ) as error:
            ids(path, DataConfig())
        assert "\n" not in str(error.value)
