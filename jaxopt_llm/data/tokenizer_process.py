"""Program of the process that loads a tokenizer.json and encodes with it: python tokenizer_process.py BYTES SECONDS.

A tokenizer.json comes with weights from any source, and is a program for native code: a damaged one can panic, expand
a text without end, or crash its process. This process bounds its time and its memory, has neither files nor a network
(isolation.py), and is the only one that dies. It imports nothing of the package.

A request may use BYTES of memory and SECONDS, and more for each byte of its texts.

A request on standard input is a line of JSON with "do" and "sizes", followed by byte strings of these sizes:

- load: the content of a tokenizer.json, or those of vocab.json and merges.txt; and "assembly", what is built from it.
  The answer has the "vocabulary"; the "special" tokens, and those with names ("named"); all "added" tokens with their
  ids and flags; the ids that transformers adds before and after a text ("prefix", "suffix"); and the parts of the file
  that the assembly replaces ("replaced").
- encode: texts. The answer has "counts", the tokens of each text, followed by all their ids, int32.
- encode_with_offsets: the same, followed by the index of the first character of each token, int32.
- decode: no byte strings, but "ids". The answer has "text".

An answer on standard output is a line of JSON with "size", the number of bytes that follow; or with "error" alone.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

MEMORY_PER_BYTE = 512  # bytes of memory for each byte of a request
BYTES_PER_SECOND = 10_000  # the slowest tokenizers encode 30 times as many
ENCODING = ("normalizer", "pre_tokenizer")
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # clean_up_tokenization_spaces


class Loaded:
    """Tokenizer that is put together as transformers does it.

    Args:
        parts: the content of tokenizer.json; or those of vocab.json and merges.txt.
        assembly: see `tokenizer_folder.Assembly`.
    """

    def __init__(self, parts: Sequence[bytes], assembly: dict[str, Any]) -> None:
        self.library, in_file, self._replaced = _build(parts, assembly)
        named = _add_tokens(self.library, assembly, in_file)
        self.named = {name: str(token) for name, token in named.items() if token is not None}
        library = self.library
        library.no_truncation()
        library.no_padding()
        self.prefix, self.suffix = self._find_ends(assembly["adds_ends"])
        library.post_processor = None  # it does not change the ids, but can change token offsets
        library.encode_special_tokens = assembly["splits_special"]
        self._cleans_up = assembly["cleans_up"] and not isinstance(library.model, BPE)

    def describe(self) -> dict[str, Any]:
        added = self.library.get_added_tokens_decoder()
        return {
            "vocabulary": self.library.get_vocab(with_added_tokens=True),
            "special": [token.content for token in added.values() if token.special],
            "added": [[index, repr(token)] for index, token in sorted(added.items())],
            "named": self.named,
            "prefix": self.prefix,
            "suffix": self.suffix,
            "replaced": self._replaced,
        }

    def decode(self, ids: Sequence[int]) -> str:
        text = str(self.library.decode(ids, skip_special_tokens=True))
        for spaced in SPACED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip() if spaced != " ' " else "'")
        return text

    def _find_ends(self, adds_ends: Sequence[bool] | None) -> tuple[list[int], list[int]]:
        """Return the ids that transformers adds before and after a text."""
        if adds_ends is not None:
            vocabulary, (adds_bos, adds_eos) = self.library.get_vocab(with_added_tokens=True), adds_ends
            names = ("bos_token", "eos_token")
            bos, eos = ([vocabulary[self.named[name]]] if name in self.named else [] for name in names)
            return bos * adds_bos, eos * adds_eos
        processor, self.library.post_processor = self.library.post_processor, None
        if processor is None:
            return [], []
        for probe in ("a", "0", *self.library.get_vocab(with_added_tokens=False)):
            if text := self.library.encode(probe).ids:
                break
        self.library.post_processor = processor
        whole = self.library.encode(probe)
        own = [index for index, added in enumerate(whole.special_tokens_mask) if not added]
        if whole.ids[own[0] : own[-1] + 1] != text:
            raise ValueError("its post-processor does more than to add tokens before and after a text")
        return whole.ids[: own[0]], whole.ids[own[-1] + 1 :]


def _build(
    parts: Sequence[bytes], assembly: dict[str, Any]
) -> tuple[Tokenizer, list[tuple[int, AddedToken]], list[str]]:
    """Return the tokenizer, the added tokens of its file if the assembly does not list them, and the replaced parts."""
    pipeline, lists = assembly["pipeline"], assembly["listed"] is not None
    if pipeline is None and lists:
        return Tokenizer.from_buffer(parts[0]), [], []
    if len(parts) == 1:
        content = json.loads(parts[0])
        vocabulary, merges = content["model"]["vocab"], content["model"].get("merges")
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges or []]
    else:
        content, vocabulary = {}, json.loads(parts[0])
        lines = parts[1].decode().removesuffix("\n").split("\n")
        merges = [tuple(line.removesuffix("\r").split(" ")) for line in lines if not line.startswith("#version")]
    in_file = [] if lists else [(token.pop("id"), AddedToken(**token)) for token in content.get("added_tokens") or []]
    if pipeline is None:
        return Tokenizer.from_buffer(parts[0]), in_file, []
    if not isinstance(vocabulary, dict) or (content and "merges" not in content["model"]):
        raise ValueError("its class in transformers needs a BPE with merges")
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    kept = {key: content.get(key) for key in ("post_processor", "truncation", "padding")}
    shell = {"version": "1.0", "added_tokens": [], **kept, **pipeline, "model": empty}
    library = Tokenizer.from_str(json.dumps(shell))
    own = Tokenizer.from_str(json.dumps({**shell, **{part: content.get(part) for part in ENCODING}}))
    replaced = [part for part in ENCODING if content and _state(own, part) != _state(library, part)]
    library.model = BPE(vocabulary, merges, dropout=None, **pipeline["model"])
    return library, in_file, replaced


def _state(library: Tokenizer, part: str) -> bytes | None:
    value = getattr(library, part)
    return None if value is None else value.__getstate__()


def _add_tokens(
    library: Tokenizer, assembly: dict[str, Any], in_file: Sequence[tuple[int, AddedToken]]
) -> dict[str, str | AddedToken | None]:
    """Add the tokens that the files next to tokenizer.json name. Returns the special tokens by name.

    It follows `from_pretrained` and `TokenizersBackend.__init__` of transformers 5 step by step, because the ids of new
    tokens depend on their order.
    """
    given = assembly["more"] if assembly["listed"] is None else assembly["listed"]
    numbered = [*((index, make_token(token)) for index, token in given), *in_file]
    by_text = {str(token): token for _, token in numbered}
    named = {name: None if token is None else make_token(token) for name, token in assembly["named"].items()}
    for name in assembly["standard"]:
        if named.get(name) is not None:
            named[name] = by_text.get(str(named[name]), named[name])
    if library.padding is not None:
        named.setdefault("pad_token", library.padding["pad_token"])
    named = {name: named.get(name) for name in [*assembly["standard"], *named]}
    extra = [make_token(token) for token in assembly["extra"]]
    special = [*(token for token in named.values() if token is not None), *extra]

    tokens = [token for _, token in sorted(dict(numbered).items(), key=lambda item: item[0])]
    known = {*(token.content for token in library.get_added_tokens_decoder().values()), *map(str, tokens)}
    for token in special:
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {str(token) for token in named.values() if token}
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[index] = AddedToken(token, special=True)
        elif not token.special and str(token) in names:
            token.special = True
    library.add_tokens(tokens)
    if assembly["adds_again"]:
        library.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(map(str, special))])
    if assembly["marks_again"]:
        library.add_special_tokens(special)
    return named


def make_token(token: str | dict[str, Any]) -> str | AddedToken:
    return token if isinstance(token, str) else AddedToken(**token)


def encode(library: Tokenizer, texts: Sequence[bytes], offsets: bool) -> tuple[dict[str, Any], bytes]:
    function = library.encode_batch if offsets else library.encode_batch_fast
    encoded = function([text.decode() for text in texts], add_special_tokens=False)
    ids = [array("i", each.ids) for each in encoded]
    starts = [array("i", [first for first, _ in each.offsets]) for each in encoded] if offsets else []
    return {"counts": [len(each) for each in ids]}, b"".join([*ids, *starts])


def answer(loaded: Loaded | None, request: dict[str, Any], parts: Sequence[bytes]) -> tuple[Loaded, dict, bytes]:
    """Return the tokenizer, the answer, and the bytes that follow it."""
    if loaded is None:
        loaded = Loaded(parts, request["assembly"])
        return loaded, loaded.describe(), b""
    if request["do"] == "decode":
        return loaded, {"text": loaded.decode(request["ids"])}, b""
    return loaded, *encode(loaded.library, parts, offsets=request["do"] == "encode_with_offsets")


def bound_memory(most: int) -> None:
    if os.name != "posix":  # only the timeout bounds it there
        return
    import resource

    # Not the address space: each thread reserves some, and there is one thread for each core.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    # These signals may also reach this process. It ends when its parent does, at the end of its standard input.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    loaded = None
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    bound_memory(memory)  # now, because a module cannot be imported later
    with open(os.devnull, "w") as null:
        runpy.run_path(str(Path(__file__).with_name("isolation.py")))["isolate"]()  # before the library starts threads
        for line in source:
            request = json.loads(line)
            size = sum(request["sizes"])
            bound_memory(memory + size * MEMORY_PER_BYTE)
            # A C thread ends the process, even during a long computation in native code.
            faulthandler.dump_traceback_later(seconds + size / BYTES_PER_SECOND, exit=True, file=null)
            try:
                parts = [source.read(each) for each in request["sizes"]]
                loaded, told, following = answer(loaded, request, parts)
                head = json.dumps({**told, "size": len(following)})
            except BaseException as error:  # a panic of the library is no Exception
                head, following = json.dumps({"error": f"{type(error).__name__}: {error}"}), b""
            sink.write(head.encode() + b"\n")
            sink.write(following)
            sink.flush()
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
