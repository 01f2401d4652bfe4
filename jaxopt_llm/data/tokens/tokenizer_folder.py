"""Files of a tokenizer folder, and how transformers 5 puts a tokenizer together from them."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_no_pointer, read_file
from jaxopt_llm.data.tokens.tokenizer_classes import BACKEND, CLASSES, Pipeline, choose_class

MAX_TOKENIZER_BYTES = 2**28  # published ones have at most 35 MB
VOCABULARY = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
NAMED_TEMPLATES = "additional_chat_templates"
# Files of the model next to a tokenizer: both name the tokens that end a text, the first with precedence.
MODEL_FILES = (GENERATION_FILE, "config.json")
# Patterns of vocabularies in formats of other libraries, which transformers converts when it loads them.
FOREIGN_FILES = (
    *("tokenizer.model", "tekken.json", "tiktoken.model", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.txt", "vocab.json"),
)
# Nothing that is code. transformers reads these by name; programs in other languages read the older ones.
TOKENIZER_FILES = (
    *(VOCABULARY, SETTINGS, "special_tokens_map.json", "added_tokens.json", "merges.txt", *FOREIGN_FILES),
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MISTRAL = (None, "mistral", "mistral3", "voxtral", "ministral", "pixtral")

Token = str | dict[str, Any]  # the text of a token, or its text as "content" with flags of tokenizers.AddedToken


@dataclass(frozen=True)
class Assembly:
    """Instructions for putting a tokenizer together from its files (library_tokenizer.py).

    Attributes:
        pipeline: parts that replace those of tokenizer.json; None: its own parts. See `TokenizerClass.build`.
        listed: added tokens by id; they replace those of tokenizer.json. None: those of tokenizer.json.
        more: further added tokens by id, if `listed` is None.
        standard: names of special tokens, in the order in which transformers adds them.
        named: special tokens by name: bos_token, ...; None if the folder declares that there is none.
        extra: special tokens without a name.
        splits_special: whether special tokens that are spelled out in a text are text.
        cleans_up: whether spaces before punctuation are removed from decoded text, except with a BPE.
        adds_ends: whether BOS and EOS are added, instead of what the post-processor of tokenizer.json adds.
        adds_again, marks_again: see `TokenizerClass`.
    """

    pipeline: Pipeline | None
    listed: list[tuple[int, Token]] | None
    more: list[tuple[int, Token]]
    standard: tuple[str, ...]
    named: dict[str, Token | None]
    extra: list[Token]
    splits_special: bool
    cleans_up: bool
    adds_ends: tuple[bool, bool] | None
    adds_again: bool
    marks_again: bool


@dataclass(frozen=True)
class TokenizerFiles:
    """Content of a tokenizer folder.

    Attributes:
        parts: the content of tokenizer.json; or those of vocab.json and merges.txt.
        chosen: the class of transformers.
        assembly: what is built from them.
        eos_tokens: the texts of eos_token, which may be a list.
    """

    parts: tuple[bytes, ...]
    chosen: str
    assembly: Assembly
    eos_tokens: tuple[str, ...]


def read_tokenizer_files(file: Path, name: str) -> TokenizerFiles:
    """Read a tokenizer.json and the files next to it.

    name: what the user calls it, for messages.

    Raises:
        InputError: transformers would read the files in another way, or the reader cannot tell.
        OSError, ValueError: there is no tokenizer.json, or it cannot be read.
    """
    config = file.with_name(SETTINGS)
    settings, model = read_json_object(config), read_json_object(file.with_name("config.json"))
    parts = _read_vocabulary(file, name, model, settings)
    chosen = _choose_readable(name, model, settings, byte_level=b'"ByteLevel"' in parts[0])
    _check_versions(name, model, settings)
    eos = settings.get("eos_token")
    if isinstance(eos, list) and eos:
        settings["eos_token"] = eos[0]
    specific = _move_extra_tokens(settings)
    listed, more = None, []
    if "added_tokens_decoder" in settings:
        listed = _read_listed(settings["added_tokens_decoder"], config)
    else:
        specific |= _merge_special_tokens_map(settings, file.with_name("special_tokens_map.json"))
        more = _read_added_tokens(file.with_name("added_tokens.json"), settings)
    kind = CLASSES.get(chosen)
    settings = {**(kind.defaults if kind else {}), **settings}
    adds = bool(settings.get("add_bos_token")), bool(settings.get("add_eos_token"))
    from_json = len(parts) == 1
    assembly = Assembly(
        kind.build(settings) if kind else None,
        listed,
        more,
        NAMED,
        _name_tokens(settings, specific, config),
        [_read_token(token, config) for token in _find_extra_tokens(settings, config)],
        splits_special=bool(settings.get("split_special_tokens")),
        cleans_up=bool(settings.get("clean_up_tokenization_spaces")),
        # transformers 5 ignores add_bos_token and add_eos_token next to a tokenizer.json
        adds_ends=adds if not from_json else (False, False) if kind and kind.drops_post_processor else None,
        adds_again=bool(kind and kind.adds_again),
        marks_again=bool(kind and kind.marks_again),
    )
    ends = eos if isinstance(eos, list) else [assembly.named.get("eos_token")]
    return TokenizerFiles(parts, chosen, assembly, tuple(_text(end) for end in ends if end))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file next to a tokenizer, or an empty dict if there is no such file."""
    if not path.is_file():
        return {}
    return json_files.read_object(path, "repair or remove the file")


def _read_vocabulary(file: Path, name: str, model: dict[str, Any], settings: dict[str, Any]) -> tuple[bytes, ...]:
    if file.exists() or not file.parent.is_dir():
        check_is_no_pointer(file)
        return (read_file(file, MAX_TOKENIZER_BYTES),)
    kind = CLASSES.get(choose_class(model, settings, byte_level=False) or "")
    found = sorted({each.name for pattern in FOREIGN_FILES for each in file.parent.glob(pattern)})
    if found == ["vocab.json"] and file.with_name("merges.txt").exists() and kind and kind.reads_merges:
        return tuple(read_file(file.with_name(each), MAX_TOKENIZER_BYTES) for each in ("vocab.json", "merges.txt"))
    if found:
        raise InputError(f"{name}: there is {' and '.join(found)}, but no tokenizer.json; {_describe_conversion(file)}")
    raise FileNotFoundError(errno.ENOENT, "", str(file))


def _describe_conversion(file: Path) -> str:
    program = f"from transformers import AutoTokenizer as A; A.from_pretrained('{file.parent}').save_pretrained('DIR')"
    return f'convert it with python -c "{program}", and name DIR'


def _choose_readable(name: str, model: dict[str, Any], settings: dict[str, Any], byte_level: bool) -> str:
    """Return the class of transformers. Raises InputError if it is neither BACKEND nor in CLASSES."""
    chosen = choose_class(model, settings, byte_level)
    if chosen == BACKEND or chosen in CLASSES:
        return chosen
    remedy = (
        'if tokenizer.json alone gives the right ids, set "tokenizer_class": "PreTrainedTokenizerFast" in '
        "tokenizer_config.json, and remove auto_map there"
    )
    if chosen is None:
        problem = (
            f"its class {settings.get('tokenizer_class') or ''} is code in the folder (auto_map), which is not run"
        )
    else:
        problem = f"the class {chosen} of transformers builds its tokenizer without the pipeline of tokenizer.json"
    raise InputError(f"{name}: {problem}; {remedy}")


def _check_versions(name: str, model: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise InputError for settings that replace the pipeline of tokenizer.json in transformers."""
    where = f"{name}: tokenizer_config.json has"
    if (others := settings.get("fast_tokenizer_files")) and others != ["tokenizer.json"]:
        remedy = "rename the one to use to tokenizer.json, and remove this list"
        raise InputError(f"{where} fast_tokenizer_files={others}; {remedy}")
    version = str(model.get("transformers_version") or "0").partition(".")[0]
    patched = not version.isdecimal() or int(version) < 5
    if settings.get("fix_mistral_regex") and patched and model.get("model_type") in _MISTRAL:
        problem = "fix_mistral_regex, which replaces the pre_tokenizer of tokenizer.json"
        raise InputError(f"{where} {problem}; save the tokenizer with transformers 5 into a folder without config.json")


def _move_extra_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    """Move additional_special_tokens to extra_special_tokens. Returns the special tokens with names of the model."""
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    keys = [key for key, value in settings.items() if _is_specific(key) and isinstance(value, str)]
    specific = {key: settings.pop(key) for key in keys}
    if isinstance(settings.get("extra_special_tokens"), dict):
        specific |= settings.pop("extra_special_tokens")
    return specific


def _is_specific(key: str) -> bool:
    return key.endswith("_token") and key not in NAMED


def _merge_special_tokens_map(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Add the tokens of special_tokens_map.json to the settings. Returns those with names of the model."""
    for key, value in read_json_object(file).items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            settings[key] = {**value, "special": True, "__type": "AddedToken"}
        elif isinstance(value, list) and key == "extra_special_tokens":
            tokens = [{**token, "special": True} if isinstance(token, dict) else token for token in value]
            existing = _check_list(settings.get(key), key, file)
            settings[key] = [*existing, *(token for token in tokens if token not in existing)]
        else:
            settings[key] = value
    extra = settings.get("extra_special_tokens")
    return settings.pop("extra_special_tokens") if isinstance(extra, dict) else {}


def _find_extra_tokens(settings: dict[str, Any], file: Path) -> list[Any]:
    key = "extra_special_tokens" if "extra_special_tokens" in settings else "additional_special_tokens"
    return _check_list(settings.get(key), key, file)


def _check_list(value: Any, key: str, file: Path) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise InputError(f"{file}: {key} is not a list of tokens; repair the file")
    return value or []


def _read_added_tokens(file: Path, settings: dict[str, Any]) -> list[tuple[int, Token]]:
    """Return the tokens of added_tokens.json. The names in the settings tell which are special."""
    named = [settings[key] for key in NAMED if settings.get(key)]
    extra = _check_list(settings.get("extra_special_tokens"), "extra_special_tokens", file)
    special = {_text(_read_token(token, file)) for token in [*named, *extra]}
    tokens = read_json_object(file)
    if any(type(index) is not int for index in tokens.values()):
        raise InputError(f"{file}: an id is not an integer; repair or remove the file")
    return [
        (index, {"content": text, "normalized": text not in special, "special": text in special})
        for text, index in tokens.items()
    ]


def _read_listed(tokens: Any, file: Path) -> list[tuple[int, Token]]:
    if not isinstance(tokens, dict) or not all(each.isdecimal() for each in tokens):
        raise InputError(f"{file}: added_tokens_decoder is not an object of tokens by id; repair the file")
    return [(int(index), _read_token(token, file)) for index, token in tokens.items()]


def _name_tokens(settings: dict[str, Any], specific: dict[str, Any], file: Path) -> dict[str, Token | None]:
    """Return the special tokens by name, in the order in which transformers adds them."""
    further = [key for key, value in settings.items() if _is_specific(key) and _is_token(value)]
    tokens = {key: settings[key] for key in [*NAMED, *further] if key in settings} | specific
    return {key: None if token is None else _read_token(token, file) for key, token in tokens.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _read_token(value: Any, file: Path) -> Token:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(
            f"{file}: {value!r} is not a special token, which is a text or an object with content; repair it"
        )
    return {"content": value["content"], **{flag: bool(value[flag]) for flag in _FLAGS if flag in value}}


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
