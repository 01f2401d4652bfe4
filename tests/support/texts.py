"""Documents in every format that a run can read, and their tokens."""

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.tokens.pieces import IndexedPiece, TokenStream, join_all, tokenize
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer


def piece(documents: Sequence[bytes], name: str = "texts") -> IndexedPiece:
    return tokenize(name, [Document(name, each, each) for each in documents], ByteTokenizer())


def stream(documents: Sequence[bytes]) -> TokenStream:
    """Return the token stream of all documents: bytes and delimiters."""
    return join_all([piece(documents)])


def write_text(folder: Path, documents: Sequence[str]) -> Path:
    """Write one file per document into subfolders, with names in order."""
    for number, document in enumerate(documents):
        path = folder / f"{number // 10:03}" / f"{number:04}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.encode())
    return folder


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    content = "".join(json.dumps({"id": i, field: each}) + "\n" for i, each in enumerate(documents)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    import pyarrow
    from pyarrow import parquet

    columns = {"id": list(range(len(documents))), field: list(documents)}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


def write_megatron(prefix: Path, documents: Sequence[np.ndarray], dtype: str = "<u2", code: int = 8) -> Path:
    """Write files in the layout of Megatron-LM's IndexedDatasetBuilder, every document in up to two sequences."""
    sequences = [half for each in documents for half in np.split(each, [each.size // 2]) if half.size]
    lengths = np.array([each.size for each in sequences], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * width]).astype("<i8")
    boundaries = np.cumsum(
        [0, *(len([h for h in np.split(d, [d.size // 2]) if h.size]) for d in documents)], dtype="<i8"
    )
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, lengths.size, boundaries.size)
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    return prefix


def write_byte_tokenizer(path: Path, more: int = 0) -> Path:
    """Write a tokenizer.json with the 256 bytes, </s> and `more` special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["</s>", *(f"<|{index}|>" for index in range(more))])
    library.save(str(path))
    return path


def train_tokenizer(
    path: Path, documents: Sequence[str], size: int = 400, special: Sequence[str] = ("<|endoftext|>",)
) -> Path:
    """Train a byte-level BPE with <|endoftext|>, like GPT-2's, on the documents."""
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer()
    library.train_from_iterator(documents, vocab_size=size, special_tokens=[*special], show_progress=False)
    library.save(str(path))
    return path


def write_arrow(path: Path, rows: Sequence[Any], stream: bool = True) -> Path:
    """Write rows as an Arrow stream with batches of 7 rows, or as a file with an index.

    Rows are objects or, for short, texts.
    """
    import pyarrow

    table = pyarrow.Table.from_pylist([{"text": row} if isinstance(row, str) else row for row in rows])
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_saved_dataset(folder: Path, shards: Sequence[Sequence[Any]]) -> Path:
    """Write a folder as `save_to_disk` of the library datasets does, with the cache of a later computation."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{len(shards):05}.arrow" for index in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_arrow(folder / name, rows)
    write_arrow(folder / "cache-db1da12eb801df68.arrow", ["never read"])
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder
