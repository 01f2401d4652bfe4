"""A pipe in place of a file is refused: to open one blocks until somebody writes to it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.find import find_corpus_files
from jaxopt_llm.data.template import find_template
from jaxopt_llm.data.tokenizer import ByteTokenizer, JsonTokenizer

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rows": ("a.jsonl", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe),)))),
    "a glob": ("a.jsonl", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe.parent / "*.jsonl"),)))),
    "tokens": ("a.npy", lambda pipe: find_corpus_files(DataConfig(paths=(str(pipe),)))),
    "weights": ("a.safetensors", safetensors.open_file),
    "a tokenizer": ("tokenizer.json", JsonTokenizer),
    "a template": ("a.jinja", lambda pipe: find_template(DataConfig(chat_template=str(pipe)), ByteTokenizer())),
}


@pytest.mark.parametrize("case", READERS)
def test_a_pipe_is_refused_before_it_is_opened(case: str, tmp_path: Path) -> None:
    name, read = READERS[case]
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}: a pipe, which is not read; name a regular file"):
        read(tmp_path / name)
