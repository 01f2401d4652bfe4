"""The reference of `prepare --reference`: which model it is, and how long its rows are."""

import json
import re
from dataclasses import replace
from pathlib import Path

import folders
import pytest
from chats import write_tokenizer
from texts import write_byte_tokenizer

from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.inference.reference import choose_length, find_context, open_reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("models") / "reference")


def test_rows_hold_the_longest_document_up_to_the_context() -> None:
    assert choose_length(300, 8192) == (2048, 0)
    assert choose_length(2049, 8192) == (2048, 0)
    assert choose_length(2050, 8192) == (2176, 0)
    assert choose_length(9000, 8192) == (8192, 8192)
    assert choose_length(300, 256) == (256, 256)
    assert choose_length(257, 256) == (256, 0)


def test_the_context_is_what_a_model_was_trained_for(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 99}))
    for weights in folder.glob("*.safetensors*"):
        (tmp_path / weights.name).symlink_to(weights)
    config = models.open_config(tmp_path)
    assert find_context(config) == 99
    run: Config = replace_fields(Config(), {"model.pretrained": str(tmp_path), "training.sequence_length": 77})
    assert find_context(run) == 99
    scratch: Config = replace_fields(Config(), {"training.sequence_length": 77})
    assert find_context(scratch) == 77
    assert find_context(replace_fields(scratch, {"model.positions": "learned", "model.max_positions": 55})) == 55


def test_the_reference_is_identified_by_its_weights(folder: Path, tmp_path: Path) -> None:
    data = DataConfig(tokenizer=str(folder), content="preference")
    tokenizer = load_tokenizer(data)
    found = open_reference(str(folder), "--reference", data, tokenizer)
    assert found.name == str(folder) and found.step is None and re.fullmatch("[0-9a-f]{64}", found.sha256)
    other = folders.folder(tmp_path / "other", replace(folders.CONFIG, layers=3))
    write_byte_tokenizer(other / "tokenizer.json")
    assert open_reference(str(other), "--reference", data, tokenizer).sha256 != found.sha256
    write_tokenizer(other)
    with pytest.raises(
        InputError, match=rf"--reference {other}: it has another tokenizer, BOS or EOS than --tokenizer"
    ):
        open_reference(str(other), "--reference", data, tokenizer)
