"""Tokenizer classes of transformers 5: which of them reads a folder, and what it builds itself.

transformers 4 used tokenizer.json as it is. In transformers 5 the class TokenizersBackend still does, but a class with
a pipeline of its own takes only the vocabulary, the merges and the post-processor of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
