"""Files of a tokenizer and of its chat template: copies in a run directory, and what an exported folder gets of them.

A run keeps the files as they are, because its token ids depend on them. An exported folder has files from which
transformers reads the ids, the template and the BOS of the training.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import TEMPLATE_FILE, TOKENIZER_FOLDER
from jaxopt_llm.core import hub, json_files
from jaxopt_llm.core.files import sync_directory, sync_tree
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.template import find_template, has_template
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer, Tokenizer, find_tokenizer_folder, read_json_object
from jaxopt_llm.data.tokens.tokenizer_folder import (
    MODEL_FILES,
    NAMED_TEMPLATES,
    SETTINGS,
    TOKENIZER_FILES,
    VOCABULARY,
    plain_name,
)

# Names for the special tokens of the byte tokenizer, which have none.
BYTE_TOKENS: dict[int | None, str] = {ByteTokenizer.bos: "<|bos|>", ByteTokenizer.eos: "<|eos|>"}


def keep_tokenizer(
    config: DataConfig, tokenizer: Tokenizer, directory: Path, prepared_corpora: Iterable[Path] = ()
) -> None:
    """Copy the files of a run's tokenizer and chat template into its directory: see `config.cli.load_run_config`.

    Copies of an earlier start are replaced; a start that dies before the end leaves none of them.

    prepared_corpora: folders with the run's data. If they were prepared with a template that is not the tokenizer's
        own, it takes the place of the tokenizer's.

    Raises:
        InputError: they were prepared with different templates.
    """
    working, kept = (directory / name for name in (f".{TOKENIZER_FOLDER}.partial", TOKENIZER_FOLDER))
    shutil.rmtree(working, ignore_errors=True)
    template = find_template(config, tokenizer).source if config.names_template else None
    if find_tokenizer_folder(config) is not None:
        working.mkdir(parents=True)
        _copy_own_files(config, working, MODEL_FILES)
        if (found := prepared.read_template(prepared_corpora)) is not None:
            _replace_templates(working, found)
        sync_tree(working)
    shutil.rmtree(kept, ignore_errors=True)
    if working.is_dir():
        working.replace(kept)
    (directory / TEMPLATE_FILE).unlink(missing_ok=True)
    if template is not None:
        (directory / TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
    sync_directory(directory)


def write_tokenizer(config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer and its chat template for transformers into an existing folder."""
    if config.uses_bytes:
        _write_json(folder / VOCABULARY, describe_bytes())
        settings: dict[str, Any] = {}
    else:
        _copy_own_files(config, folder)
        settings = read_json_object(folder / SETTINGS)
    changed = _set_tokens(config, tokenizer, settings, folder / VOCABULARY)
    if config.names_template:
        changed.pop("chat_template", None)
        _replace_templates(folder, find_template(config, tokenizer).source)
    if changed != settings:
        _write_json(folder / SETTINGS, changed)
    drop_code(folder)


def drop_code(folder: Path) -> None:
    """Remove the names of code, which is not copied, from the tokenizer_config.json of a new folder."""
    settings = read_json_object(folder / SETTINGS)
    if settings.pop("auto_map", None) is not None:
        _write_json(folder / SETTINGS, settings)


def copy_files(source: Path, folder: Path, more: Iterable[str] = ()) -> None:
    """Copy the files of a tokenizer and of its templates, as they are, into an existing folder.

    more: names of further files.
    """
    for pattern in (*TOKENIZER_FILES, TEMPLATE_FILE, f"{NAMED_TEMPLATES}/*.jinja", *more):
        for file in filter(Path.is_file, sorted(source.glob(pattern))):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def _copy_own_files(config: DataConfig, folder: Path, more: Iterable[str] = ()) -> None:
    """Copy the files of `data.tokenizer`. A tokenizer file with another name is copied as tokenizer.json."""
    source = find_tokenizer_folder(config)
    assert source is not None
    copy_files(source, folder, more)
    named = hub.find_folder(config.tokenizer, "data.tokenizer=", weights=False)
    if named.is_file():
        shutil.copyfile(named, folder / VOCABULARY)


def _replace_templates(folder: Path, template: str) -> None:
    """Write a template into a folder, in place of those in files of their own."""
    shutil.rmtree(folder / NAMED_TEMPLATES, ignore_errors=True)
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")


def _set_tokens(config: DataConfig, tokenizer: Tokenizer, settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json with the BOS and EOS of the training.

    If a BOS must be added for it, the post-processor of `file`, the tokenizer.json, adds it from now on. A conversation
    gets BOS only from its template, if there is one. The template may read the names of the tokens, so they stay as
    they were.
    """
    changed = dict(settings)
    # The training may have read another class from the config.json next to the files, which is not copied.
    if plain_name(settings.get("tokenizer_class")) != plain_name(tokenizer.class_name):
        changed["tokenizer_class"] = tokenizer.class_name
    if not settings:
        changed["clean_up_tokenization_spaces"] = False
    if config.uses_bytes:
        changed["split_special_tokens"] = True  # in a text, their names are bytes like others
    is_framed = config.content == "text" or not has_template(config)
    if not is_framed or not (config.uses_bytes or not settings or config.bos or config.eos):
        return changed
    names: dict[int | None, str] = {index: token for token, index in tokenizer.vocabulary.items()}
    names |= BYTE_TOKENS if config.uses_bytes else {}
    if not settings or config.eos:
        changed["eos_token"] = names[tokenizer.eos]
    if tokenizer.bos is not None and (not settings or config.bos):
        changed |= {"bos_token": names[tokenizer.bos], "add_bos_token": True}
        _add_bos(file, names[tokenizer.bos], tokenizer.bos)
    return changed


def _add_bos(file: Path, name: str, index: int) -> None:
    """Let the post-processor of a tokenizer.json put BOS before each text, instead of tokens that it adds now."""
    content = json_files.read_object(file, "repair the file")
    before = content.get("post_processor")
    steps = before.get("processors", [before]) if before else []
    singles = [step.get("single") for step in steps if step.get("type") == "TemplateProcessing"]
    if any(single and single[0].get("SpecialToken", {}).get("id") == name for single in singles):
        return
    token, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    adding = {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]}},
    }
    kept = [step for step in steps if step.get("type") != "TemplateProcessing"]
    content["post_processor"] = {"type": "Sequence", "processors": [*kept, adding]} if kept else adding
    _write_json(file, content)


def describe_bytes() -> dict[str, Any]:
    """Return the tokenizer.json of the byte tokenizer: a byte-level BPE without merges, whose ids are the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    # Byte-level tokenizers write other bytes as the characters from U+0100 on.
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": name, **flags} for index, name in BYTE_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
