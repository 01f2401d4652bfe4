"""Program of the process that loads a tokenizer.json and encodes with it: python tokenizer_process.py BYTES SECONDS.

A tokenizer.json comes with weights from any source, and is a program for native code: a damaged one can panic, expand
a text without end, or crash its process. This process bounds its time and its memory, has neither files nor a network
(isolation.py), and is the only one that dies. It imports nothing of the package.

A request may use BYTES of memory and SECONDS, and more for each byte of its texts.

A request on standard input is a line of JSON with "do" and "sizes", followed by byte strings of these sizes:

- load: the content of a tokenizer.json. The answer has "vocabulary" and "special", the special tokens.
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

from tokenizers import Tokenizer

MEMORY_PER_BYTE = 512  # bytes of memory for each byte of a request
BYTES_PER_SECOND = 10_000  # the slowest tokenizers encode 30 times as many


def load(content: bytes) -> tuple[Tokenizer, dict[str, Any]]:
    library = Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    library.post_processor = None  # it does not change the ids, but can change token offsets
    added = library.get_added_tokens_decoder().values()
    special = [str(token.content) for token in added if token.special]
    return library, {"vocabulary": library.get_vocab(with_added_tokens=True), "special": special}


def encode(library: Tokenizer, texts: Sequence[bytes], offsets: bool) -> tuple[dict[str, Any], bytes]:
    function = library.encode_batch if offsets else library.encode_batch_fast
    encoded = function([text.decode() for text in texts], add_special_tokens=False)
    ids = [array("i", each.ids) for each in encoded]
    starts = [array("i", [first for first, _ in each.offsets]) for each in encoded] if offsets else []
    return {"counts": [len(each) for each in ids]}, b"".join([*ids, *starts])


def answer(library: Tokenizer | None, request: dict[str, Any], parts: Sequence[bytes]) -> tuple[Any, dict, bytes]:
    """Return the tokenizer, the answer, and the bytes that follow it."""
    if library is None:
        return *load(parts[0]), b""
    if request["do"] == "decode":
        return library, {"text": library.decode(request["ids"], skip_special_tokens=True)}, b""
    return library, *encode(library, parts, offsets=request["do"] == "encode_with_offsets")


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
    library = None
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
                library, told, following = answer(library, request, parts)
                head = json.dumps({**told, "size": len(following)})
            except BaseException as error:  # a panic of the library is no Exception
                head, following = json.dumps({"error": f"{type(error).__name__}: {error}"}), b""
            sink.write(head.encode() + b"\n")
            sink.write(following)
            sink.flush()
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
