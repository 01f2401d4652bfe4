"""Files of an exported folder that describe a training: tokenizer, chat template, and settings of generation."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import Settings
from jaxopt_llm.checkpoint.huggingface.model_folder import Origin, write_nothing
from jaxopt_llm.config import DataConfig
from jaxopt_llm.config.data import PROMPT, parse_arguments
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.continuation import find_eos_ids
from jaxopt_llm.data.tokens.template import Renderer, find_template, has_template
from jaxopt_llm.data.tokens.tokenizer import (
    Tokenizer,
    find_tokenizer_folder,
    load_tokenizer,
    read_json_object,
)
from jaxopt_llm.data.tokens.tokenizer_files import copy_files, drop_code, write_tokenizer
from jaxopt_llm.data.tokens.tokenizer_folder import BACKEND, GENERATION_FILE, VOCABULARY, choose_class, plain_name

# Fields of a base's generation_config.json that are kept: numbers that choose and end a text, and nothing that names
# code. The EOS tokens of the training are added.
GENERATION_FIELDS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_beams", "length_penalty", "early_stopping", "penalty_alpha", "use_cache", "guidance_scale"),
    *("repetition_penalty", "no_repeat_ngram_size", "max_length", "min_length", "max_new_tokens", "min_new_tokens"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "bos_token_id", "pad_token_id"),
)


def describe_training(data: DataConfig, base: Path | None, write_card: Callable[[Path], None]) -> Origin:
    """Return the files and token ids that a folder of a trained model keeps from the training.

    Args:
        data: settings that name the tokenizer and the chat template of the training.
        base: Hugging Face folder that the training started from; None if there is none.
        write_card: writes the model card into the new folder.
    """
    tokenizer = load_tokenizer(data)
    ids = _find_token_ids(data, tokenizer, base)
    generation = _make_generation_config(data, base, ids)

    def write_files(folder: Path) -> None:
        write_tokenizer(data, tokenizer, folder)
        (folder / GENERATION_FILE).write_text(json.dumps(generation, indent=2) + "\n")
        write_card(folder)

    return Origin(base, ids, write_files)


def list_tokenizer_notes(data: DataConfig, model_type: str) -> list[str]:
    """Return a sentence if transformers reads the tokenizer of an exported folder with a class that may differ."""
    tokenizer = load_tokenizer(data)
    settings = {"tokenizer_class": tokenizer.class_name}
    own, chosen = plain_name(tokenizer.class_name), choose_class({"model_type": model_type}, settings, byte_level=False)
    if chosen == own or (chosen == BACKEND and not tokenizer.note):  # without a note, the file alone gives the same ids
        return []
    return [
        f"AutoTokenizer of transformers 5 reads the tokenizer of every {model_type} model as a {chosen}: load it with "
        f"{tokenizer.class_name}, which reads it as the training did."
    ]


def list_prompt_notes(data: DataConfig) -> list[str]:
    """Return a sentence on the variables of the chat template that were set, which a folder cannot hold."""
    arguments = parse_arguments(data.template_arguments)
    if not arguments:
        return []
    passed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return [
        f"The prompts of the training had {' '.join(data.template_arguments)}: pass it to apply_chat_template, as in "
        f"tokenizer.apply_chat_template(messages, {passed})."
    ]


def copy_origin(folder: Path) -> Origin:
    """Return the files that a copy of a Hugging Face folder's model keeps: the folder's own, as they are."""

    def write_files(target: Path) -> None:
        copy_files(folder, target, [GENERATION_FILE])
        drop_code(target)

    return Origin(folder, {}, write_files)


def describe_merge(
    base: Path, adapter: Path, vocabulary_size: int, write_card: Callable[[Path], None] = write_nothing
) -> Origin:
    """Return the files and token ids that a folder keeps after the adapters of a PEFT folder are merged into it.

    The tokenizer and the template are the adapters' own if their folder has them, because they were trained with these.

    Raises:
        InputError: the adapters' tokenizer has more tokens than the model's vocabulary.
    """
    if (adapter / VOCABULARY).is_file():
        data = DataConfig(tokenizer=str(adapter.absolute()))
        if (size := load_tokenizer(data).vocabulary_size) > vocabulary_size:
            problem = f"its tokenizer has {size} tokens, more than the vocabulary of {base} ({vocabulary_size})"
            raise InputError(f"--adapter {adapter}: {problem}; name the base that the adapters were trained over")
        return describe_training(data, base, write_card)
    copied = copy_origin(base)

    def write_files(folder: Path) -> None:
        copied.write_files(folder)
        write_card(folder)

    return replace(copied, write_files=write_files)


def _find_token_ids(data: DataConfig, tokenizer: Tokenizer, base: Path | None) -> Settings:
    """Return the token ids of config.json. What the tokenizer does not declare is left to the base."""
    ends = find_eos_ids(data, tokenizer, _find_turn_end(data, tokenizer))
    ordered = [tokenizer.eos, *sorted(ends - {tokenizer.eos})]
    ids: dict[str, Any] = {"eos_token_id": ordered if len(ordered) > 1 else tokenizer.eos}
    for name in ("bos", "pad"):
        if (index := tokenizer.vocabulary.get(tokenizer.named_tokens.get(f"{name}_token", ""))) is not None:
            ids[f"{name}_token_id"] = index
    if tokenizer.bos is not None:
        ids["bos_token_id"] = tokenizer.bos
    return ids


def _find_turn_end(data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Return the token that ends a turn in the chat template; None: there is no template, or none ends a turn."""
    dated = replace(data, date=data.date or "2000-01-01")  # the end of a turn depends on no date
    try:
        template = find_template(dated, tokenizer) if has_template(data) else None
    except InputError:
        if data.content not in ("text", PROMPT):
            raise
        return None  # texts need no template
    if template is None:
        return None
    try:
        return Renderer(template).find_turn_end()
    except InputError as error:
        print(f"warning: {error}; the token that ends a turn is not added to eos_token_id", file=sys.stderr)
        return None


def _make_generation_config(data: DataConfig, base: Path | None, ids: Settings) -> dict[str, Any]:
    """Return the generation_config.json: the settings of the base, and the token ids of the training."""
    folders = [folder for folder in (find_tokenizer_folder(data), base) if folder]
    configs = [read_json_object(folder / GENERATION_FILE) for folder in folders]
    settings: dict[str, Any] = next((each for each in configs if each), {})
    kept = {name: settings[name] for name in GENERATION_FIELDS if settings.get(name) is not None}
    return kept | ids
