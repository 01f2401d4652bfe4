"""Small tokenizer folders in the shapes of published ones, and texts that tell them apart."""

import functools
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<bos>", "<eos>", "<tool>", "<mask>", "[SEP]")
PIECES = (
    (
        "e\u0301",
        "\u1e9b\u0323",
        "ﬁ",
        "Å",
        "a\u0308\u0304",
        "हिन्दी",
        "\u0e19\u0e49\u0e33",
        "한국어",
        "\u1112\u1161\u11ab",
    ),  # marks
    ("🙂", "👩‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "\U0001f9ff"),
    ("你好，世界", "日本語のテキスト", "ｱﾊﾟｰﾄ", "𠮷野家", "１２３"),
    ("שלום", "مرحبا بالعالم", "\u202eabc\u202c", "\u200f"),
    ("\u200b", "\u200d", "\ufeff", "\u00ad", "\u2060"),
    ("\0", "\x01", "\x1b[0m", "\x7f", "\x85", "\u2028", "\ufffd", "\U0010ffff"),
    (" ", "  ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "▁", "▁▁"),
    ("don't", "WE'LL", "it's", "1234567", "3.14", "x=1", "...", "!?", " ,", "n't", "Ω≈ç√", "naïve", "Hello", "world"),
    ("def f(x):", "return x", "self.a[0]", "'''", '"""', "#!", "\\n", "==", "->", "<", ">", "|", "</", "<0x0A>"),
    CONTROL,
)


@functools.cache
def texts(count: int = 2000) -> list[str]:
    """Return texts of all kinds, always the same ones: some of pieces, and a quarter of lines of Python's library."""
    choose = random.Random(7)
    files = [Path(sysconfig.get_paths()["stdlib"], name) for name in ("textwrap.py", "heapq.py", "fractions.py")]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    found = ["", " ", "  ", "\n", *CONTROL]
    while len(found) < count:
        if len(found) % 4 == 0:
            begin = choose.randrange(len(lines))
            found.append("".join(lines[begin : begin + choose.randrange(1, 6)]))
        else:
            kinds = [choose.choice(PIECES) for _ in range(choose.randrange(1, 12))]
            found.append(choose.choice(("", " ")).join(choose.choice(kind) for kind in kinds))
    return found


LLAMA_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def split_bytes(words: str, *before: Any) -> Any:
    split = pre_tokenizers.Split(Regex(words), "isolated")
    return pre_tokenizers.Sequence([*before, split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@functools.cache
def _trained(kind: str) -> str:
    """Return the JSON of a tokenizer without special tokens: bytes, spaces (with byte fallback), unigram or pieces."""
    corpus = [text for text in texts() if not any(token in text for token in CONTROL)]
    common: dict[str, Any] = {"show_progress": False}
    if kind == "bytes":
        library = Tokenizer(models.BPE())
        library.pre_tokenizer, library.decoder = split_bytes(LLAMA_WORDS), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, **common)
    elif kind == "spaces":
        library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        library.decoder = decoders.Sequence(parts)
        first = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=first, limit_alphabet=120, **common)
    elif kind == "unigram":
        library = Tokenizer(models.Unigram())
        spaces = normalizers.Replace(Regex(" {2,}"), " ")
        library.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces, normalizers.Strip(True, True)])
        library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        first = ["<unk>", "</s>", "<pad>"]
        trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=first, **common)
    else:
        library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", "[CLS]", "[SEP]"], **common)
    library.train_from_iterator(corpus, trainer)
    if kind == "spaces":
        # Only the bytes stay out of the text: real folders list them in the vocabulary alone.
        content = json.loads(library.to_str())
        content["added_tokens"] = [
            each for each in content["added_tokens"] if each["content"] in ("<unk>", "<s>", "</s>")
        ]
        return json.dumps(content)
    return library.to_str()


def library(kind: str, *special: str | AddedToken, **parts: Any) -> Tokenizer:
    """Return a trained tokenizer with special tokens and other parts: normalizer, pre_tokenizer, post_processor."""
    made = Tokenizer.from_str(_trained(kind))
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens([*special])
    return made


def adds(made: Tokenizer, *template: str) -> Tokenizer:
    """Let the post-processor of a tokenizer add tokens: a template such as "<s>", "$A"."""
    special = [(token, made.token_to_id(token)) for token in template if token != "$A"]
    made.post_processor = processors.TemplateProcessing(" ".join(template), special_tokens=special)
    return made


def write(folder: Path, made: Tokenizer | dict[str, str], model: str | dict[str, Any] = "", **settings: Any) -> Path:
    """Write a folder. made: the tokenizer.json, or files by name; model: model_type or all of config.json."""
    folder.mkdir(exist_ok=True)
    files: dict[str, Any] = {"tokenizer.json": made.to_str()} if isinstance(made, Tokenizer) else dict(made)
    if model:
        files["config.json"] = json.dumps({"model_type": model} if isinstance(model, str) else model)
    files["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def listed(*tokens: dict[str, Any]) -> dict[str, Any]:
    """Return an added_tokens_decoder. Each token has an id; it is special, without other flags, if it names none."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {str(token["id"]): {**flags, **{k: v for k, v in token.items() if k != "id"}} for token in tokens}


def _listing(made: Tokenizer, *more: dict[str, Any]) -> dict[str, Any]:
    own = [{"id": i, "content": each.content} for i, each in made.get_added_tokens_decoder().items()]
    return listed(*own, *more)


def _gpt2(folder: Path) -> Path:
    made = library("bytes", "<|endoftext|>", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    end = "<|endoftext|>"
    return write(
        folder, made, "gpt2", tokenizer_class="GPT2Tokenizer", bos_token=end, eos_token=end, add_bos_token=True
    )


def _llama3(folder: Path) -> Path:
    made = library("bytes", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    made.model.ignore_merges = True
    adds(made, "<s>", "$A")
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), made.post_processor])
    return write(folder, made, "llama", bos_token="<s>", eos_token="</s>", added_tokens_decoder=_listing(made))


def _qwen(folder: Path) -> Path:
    made = library("bytes", "<|endoftext|>", "<|im_start|>", "<|im_end|>", normalizer=normalizers.NFC())
    tool = {"id": 999, "content": "<tool>", "special": False}
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    extra = {"additional_special_tokens": ["<|im_start|>", "<|vision|>"]}
    listing = _listing(made, tool)
    return write(
        folder, made, "qwen3", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=listing, **names, **extra
    )


def _merges_alone(folder: Path, **settings: Any) -> Path:
    made = json.loads(library("bytes", normalizer=None).to_str())["model"]
    merges = ["#version: 0.2", *(merge if isinstance(merge, str) else " ".join(merge) for merge in made["merges"])]
    files = {"vocab.json": json.dumps(made["vocab"], ensure_ascii=False), "merges.txt": "\n".join(merges) + "\n"}
    return write(folder, files, **settings)


def _qwen_merges(folder: Path) -> Path:
    tokens = listed({"id": 700, "content": "<|endoftext|>"}, {"id": 705, "content": "<|im_end|>"})
    return _merges_alone(
        folder, model="qwen2", tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", added_tokens_decoder=tokens
    )


def _gpt2_merges(folder: Path) -> Path:
    (folder / "added_tokens.json").write_text(json.dumps({"<mask>": 701, "<tool>": 700}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "<mask>", "lstrip": True}}))
    return _merges_alone(folder, tokenizer_class="GPT2Tokenizer", bos_token="<s>", add_bos_token=True)


def _llama2(model: str, **settings: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        made = adds(library("spaces"), "<s>", "$A")
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
        return write(folder, made, model, **{"tokenizer_class": "LlamaTokenizer", **names, **settings})

    return make


def _gemma(folder: Path) -> Path:
    made = library("spaces", "<bos>", "<eos>", "<pad>", "<mask>", normalizer=normalizers.Replace(" ", "▁"))
    adds(made, "<bos>", "$A")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": True}
    names |= {"clean_up_tokenization_spaces": True}  # a BPE ignores it
    return write(folder, made, "gemma2", tokenizer_class="GemmaTokenizerFast", **names)


def _unigram(folder: Path) -> Path:
    made = adds(library("unigram"), "$A", "</s>")
    return write(folder, made, eos_token="</s>", pad_token="<pad>", extra_special_tokens={"image_token": "<mask>"})


def _pieces(folder: Path) -> Path:
    made = adds(library("pieces", "[UNK]", "[CLS]", "[SEP]"), "[CLS]", "$A", "[SEP]")
    return write(folder, made, eos_token="[SEP]", cls_token="[CLS]", clean_up_tokenization_spaces=True)


def _flags(folder: Path) -> Path:
    made = library("bytes", "</s>", normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    made.add_tokens(["<tool>"])
    made.enable_padding(pad_token="<pad>")
    tokens = listed(
        {"id": 900, "content": "<|im_start|>", "lstrip": True},
        {"id": 901, "content": "<|im_end|>", "rstrip": True, "normalized": True},
        {"id": 902, "content": "hello", "single_word": True, "special": False},
        {"id": 903, "content": "world", "normalized": True, "special": False},
        {"id": 904, "content": "</s>", "lstrip": True, "rstrip": True, "special": False},
        {"id": 905, "content": "<tool>"},
    )
    return write(folder, made, "llama", eos_token="</s>", added_tokens_decoder=tokens, tool_token="<tool>")


def _legacy(folder: Path) -> Path:
    made = adds(library("bytes", "<s>", "</s>"), "<s>", "$A")
    token = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": True}
    names = {"mask_token": token, "eos_token": "<eos>", "sep_token": "[SEP]", "pad_token": "</s>"}
    extra = {"additional_special_tokens": ["<|im_start|>"], "tool_token": "<tool>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names | extra))
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 801, "<|endoftext|>": 800, "[SEP]": 802}))
    return write(folder, made, "granite", bos_token="<s>", eos_token="</s>", unk_token=None)


def _extra(folder: Path) -> Path:
    described = {"__type": "AddedToken", "content": "<|im_end|>", "rstrip": True, "normalized": False}
    made = adds(library("bytes", "<s>", "</s>", "<bos>"), "<s>", "<bos>", "$A", "</s>")
    extra = {"extra_special_tokens": ["<|im_start|>", described], "additional_special_tokens": ["<mask>"]}
    return write(folder, made, "glm4", eos_token="</s>", video_token="<tool>", **extra)


def _split_special(folder: Path) -> Path:
    made = adds(library("bytes", "<s>", "</s>"), "<s>", "$A")
    return write(folder, made, "llama", eos_token="</s>", bos_token="<s>", split_special_tokens=True)


def _smollm(folder: Path) -> Path:
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Sequence([digits, byte_level])
    made = library("bytes", "<|endoftext|>", "<|im_start|>", "<|im_end|>", pre_tokenizer=split)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return write(folder, made, "llama", tokenizer_class="GPT2Tokenizer", added_tokens_decoder=_listing(made), **names)


def _deepseek(folder: Path) -> Path:
    made = adds(library("bytes", "<s>", "</s>", normalizer=normalizers.Sequence([])), "<s>", "$A")
    names = {"bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True}, "eos_token": "</s>"}
    return write(folder, made, "deepseek_v3", tokenizer_class="LlamaTokenizerFast", add_bos_token=True, **names)


def _named(name: str, model: str, **settings: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        made = adds(library("bytes", "<s>", "</s>", "<|endoftext|>"), "<s>", "$A")
        return write(folder, made, model, tokenizer_class=name, bos_token="<s>", eos_token="</s>", **settings)

    return make


SHAPES: dict[str, Callable[[Path], Path]] = {
    "gpt 2": _gpt2,
    "llama 3": _llama3,
    "qwen": _qwen,
    "qwen, merges alone": _qwen_merges,
    "gpt 2, merges alone": _gpt2_merges,
    "llama 2": _llama2("llama", legacy=False),
    "llama 2, legacy": _llama2("llama", legacy=True, add_prefix_space=True),
    "llama 2, no prefix": _llama2("llama", add_prefix_space=False),
    "mistral": _llama2("mistral", legacy=False),
    "gemma": _gemma,
    "unigram": _unigram,
    "pieces": _pieces,
    "flags": _flags,
    "legacy files": _legacy,
    "extra": _extra,
    "split special": _split_special,
    "smollm": _smollm,
    "deepseek": _deepseek,
    "deepseek distilled": _named("LlamaTokenizerFast", "qwen2"),
    "phi": _named("CodeGenTokenizer", "phi", add_prefix_space=True),
    "neox": _named("GPTNeoXTokenizerFast", "gpt_neox", add_bos_token=True),
    "cohere": _named("CohereTokenizerFast", "cohere2", extra_special_tokens=["<mask>"]),
    "qwen 3.5": _named("Qwen3_5Tokenizer", "qwen3_5"),
    "no class": lambda folder: write(folder, library("bytes", "</s>"), "gpt2", eos_token="</s>", tokenizer_class=None),
}
