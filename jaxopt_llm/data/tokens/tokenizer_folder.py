"""Files of a tokenizer folder, and how transformers 5 puts a tokenizer together from them.

transformers 4 used tokenizer.json as it is. In transformers 5 the class TokenizersBackend still does, but a class with
a pipeline of its own takes only the vocabulary, the merges and the post-processor of the file.
"""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_no_pointer, read_file

# --- Classes of transformers: which of them reads a folder, and what it builds itself


Settings = Mapping[str, Any]
Pipeline = dict[str, Any]

BACKEND = "TokenizersBackend"
GENERIC_CLASS = "PreTrainedTokenizerFast"  # its name in transformers 4, which transformers 5 knows too
_BACKEND_NAMES = {BACKEND, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
_OTHER_NAMES = {"Phi3Tokenizer": "LlamaTokenizer"}

# The class of each `model_type` of config.json in transformers 5.23. A type that is missing has none:
# tokenizer_class decides.
_TYPES = {
    BACKEND: "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 "
    "ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 "
    "gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax "
    "hyperclovax_vlm internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next "
    "mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral "
    "mistral3 mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 "
    "nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe "
    "pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl",
    "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip "
    "instructblipvideo jais2 opt phi starcoder2",
    "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl "
    "lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe "
    "qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma "
    "shieldgemma2 t5gemma zaya",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "LlamaTokenizer": "idefics idefics2",
}
REGISTERED = {kind: name for name, kinds in _TYPES.items() for kind in kinds.split()}
# Types whose published folders name a wrong tokenizer_class: the registered class is used instead.
CORRECTED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2"}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}"
    r"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TokenizerClass:
    """Class of transformers that builds a BPE tokenizer itself.

    Attributes:
        build: returns the pipeline for the settings of tokenizer_config.json, with its `defaults` filled in. Its items
            are the JSON of tokenizer.json, except `model`, which has the arguments of `tokenizers.models.BPE`.
        defaults: special tokens that the class has if tokenizer_config.json does not name others.
        reads_merges: whether it also reads vocab.json and merges.txt without a tokenizer.json.
        drops_post_processor: whether BOS and EOS never depend on the file's post-processor.
        adds_again: whether all special tokens are added a second time, without their flags.
        marks_again: whether all special tokens are added a second time, marked as special.
    """

    build: Callable[[Settings], Pipeline]
    defaults: dict[str, str | None] = field(default_factory=dict)
    reads_merges: bool = False
    drops_post_processor: bool = False
    adds_again: bool = False
    marks_again: bool = False


def _byte_level(settings: Settings, use_regex: bool = True) -> Pipeline:
    prefix = bool(settings.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def _make_byte_level(normalizer: str = "", *splits: Pipeline) -> Callable[[Settings], Pipeline]:
    def build(settings: Settings) -> Pipeline:
        last = _byte_level(settings, use_regex=not any(split["type"] == "Split" for split in splits))
        return {
            "model": {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False},
            "normalizer": {"type": normalizer} if normalizer else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]} if splits else last,
            "decoder": _byte_level({}),
        }

    return build


def _split_words(letters: str) -> Pipeline:
    pattern = {"Regex": _WORDS.format(letters=letters)}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _decode_spaces(strips: bool) -> Pipeline:
    first = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return {"type": "Sequence", "decoders": [*first, *last]}


def _build_llama(settings: Settings) -> Pipeline:
    given = settings.get("add_prefix_space")
    prefix = given is None or bool(given)
    scheme = ("always" if settings.get("legacy", False) else "first") if prefix else "never"
    return {
        "model": {"fuse_unk": True, "byte_fallback": True},
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": _decode_spaces(strips=prefix),
    }


def _build_gemma(settings: Settings) -> Pipeline:
    unknown = settings.get("unk_token")
    text = unknown.get("content") if isinstance(unknown, dict) else unknown
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "model": {"fuse_unk": True, "byte_fallback": True, "unk_token": str(text)},
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": split,
        "decoder": _decode_spaces(strips=False),
    }


_END = "<|endoftext|>"
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
_QWEN = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_COHERE = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"}
CLASSES = {
    "LlamaTokenizer": TokenizerClass(_build_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GemmaTokenizer": TokenizerClass(
        _build_gemma,
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "GPT2Tokenizer": TokenizerClass(_make_byte_level(), {**_GPT2, "pad_token": None}, reads_merges=True),
    "CodeGenTokenizer": TokenizerClass(_make_byte_level(), {**_GPT2, "pad_token": None}, reads_merges=True),
    "GPTNeoXTokenizer": TokenizerClass(
        _make_byte_level("NFC"), {**_GPT2, "pad_token": "<|padding|>"}, reads_merges=True, drops_post_processor=True
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _make_byte_level("NFC", _split_words(r"\p{L}")), _QWEN, reads_merges=True, adds_again=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(_make_byte_level("NFC", _split_words(r"\p{L}\p{M}")), _QWEN),
    "CohereTokenizer": TokenizerClass(
        _make_byte_level("NFC", {"type": "Digits", "individual_digits": True}),
        {**_COHERE, "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
        reads_merges=True,
        marks_again=True,
    ),
}


def choose_class(model: Settings, settings: Settings, byte_level: bool) -> str | None:
    """Return the name of the class that AutoTokenizer takes for a folder; None if it is code in the folder.

    The name is BACKEND, a key of CLASSES, or another class of transformers.

    Args:
        model: the content of config.json.
        settings: the content of tokenizer_config.json.
        byte_level: whether "ByteLevel" appears in tokenizer.json.
    """
    kind = str(model.get("model_type") or "")
    registered = REGISTERED.get(kind)
    declared = plain_name(settings.get("tokenizer_class"))
    name = declared or plain_name(model.get("tokenizer_class"))
    code = settings.get("auto_map") or {}
    if code.get("AutoTokenizer") if isinstance(code, dict) else code:
        if not registered and declared not in {*CLASSES, *_BACKEND_NAMES}:
            return None
    elif name == "LlamaTokenizer" and byte_level and kind not in CORRECTED:
        return BACKEND
    elif name and registered and name != registered:
        return registered if registered == BACKEND or kind in CORRECTED else name
    return name or registered or BACKEND


def plain_name(name: Any) -> str:
    """Return the name of a class without its former suffix, and one of several names of a class."""
    plain = str(name or "").removesuffix("Fast")
    return BACKEND if plain in _BACKEND_NAMES else _OTHER_NAMES.get(plain, plain)


# --- Files of a folder


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
    """Instructions for putting a tokenizer together from its files; see `JsonTokenizer`.

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
