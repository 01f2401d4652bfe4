"""A pipe in place of a file is refused: to open one blocks until somebody writes to it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.files import find_corpus_files
from jaxopt_llm.data.tokens.prepared import read_shard_records
from jaxopt_llm.data.tokens.template import find_template
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, JsonTokenizer

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rows": ("a.jsonl", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe),)))),
    "a glob": ("a.jsonl", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe.parent / "*.jsonl"),)))),
    "tokens": ("a.npy", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe),)))),
    "records of shards": ("shards.jsonl", lambda pipe: read_shard_records(pipe.parent)),
    "weights": ("a.safetensors", safetensors.open_file),
    "a tokenizer": ("tokenizer.json", JsonTokenizer),
    "a template": ("a.jinja", lambda pipe: find_template(DataConfig(chat_template=str(pipe)), ByteTokenizer())),
}


@pytest.mark.parametrize("case", READERS)
def test_a_pipe_is_refused_before_it_is_opened(case: str, tmp_path: Path) -> None:
    name, read = READERS[case]
    os.mkfifo(tmp_path / name)
    # Whoever opens it nevertheless reads nothing, and fails the test instead of blocking it.
    writer = threading.Thread(target=(tmp_path / name).write_bytes, args=(b"",))
    writer.start()
    try:
        with pytest.raises(InputError, match=f"{name}: a pipe, which is not read; name a regular file"):
            read(tmp_path / name)
    finally:
        reader = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)  # ends the writer
        writer.join()
        os.close(reader)
