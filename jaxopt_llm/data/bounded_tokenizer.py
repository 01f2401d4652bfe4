"""Client of the process that runs a tokenizer.json: see tokenizer_process.py."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokenizer_folder import Assembly

MEMORY, SECONDS = 2**32, 120.0  # bytes, and seconds for one call: limits for empty texts
PROGRAM = Path(__file__).with_name("tokenizer_process.py")

Ids = NDArray[np.int32]


class Refused(Exception):
    """Error of the library, with its message."""


class BoundedTokenizer:
    """Tokenizer of a tokenizer.json in a process of its own, which ends with this object. Any thread may call it.

    Attributes:
        vocabulary: id of each token.
        special_tokens: tokens that do not stand for text.
        named_tokens: special tokens by their names in transformers: bos_token, eos_token, ...
        added_tokens: ids and descriptions of all added tokens.
        prefix: ids that transformers adds before a text.
        suffix: ids that transformers adds after a text.
        replaced: parts of the file that were replaced.
    """

    def __init__(self, name: str, parts: Sequence[bytes], assembly: Assembly) -> None:
        """Load a tokenizer.

        Args:
            name: what the user calls it, for messages.
            parts: see `TokenizerFiles`.
            assembly: what is built from them.

        Raises:
            Refused: the library does not accept the content.
            InputError: the process has crashed, or used more than its time or its memory.
        """
        # -P: files next to the program must not shadow modules of Python's library. A panic writes to standard error.
        command = [sys.executable, "-P", str(PROGRAM), str(MEMORY), str(SECONDS)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)
        self._name, self._lock = name, threading.Lock()
        answer, _ = self._request("load", parts, assembly=asdict(assembly))
        self.vocabulary: dict[str, int] = answer["vocabulary"]
        self.special_tokens: list[str] = answer["special"]
        self.named_tokens: dict[str, str] = answer["named"]
        self.added_tokens: list[tuple[int, str]] = answer["added"]
        self.prefix: tuple[int, ...] = tuple(answer["prefix"])
        self.suffix: tuple[int, ...] = tuple(answer["suffix"])
        self.replaced: list[str] = answer["replaced"]

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        answer, following = self._ask("encode", texts)
        return _split(answer["counts"], np.frombuffer(following, np.int32))

    def encode_with_offsets(self, texts: Sequence[bytes]) -> list[tuple[Ids, NDArray[np.int64]]]:
        answer, following = self._ask("encode_with_offsets", texts)
        ids, starts = np.split(np.frombuffer(following, np.int32), 2)
        counts = answer["counts"]
        return list(zip(_split(counts, ids), _split(counts, starts.astype(np.int64)), strict=True))

    def decode(self, ids: Iterable[int]) -> str:
        answer, _ = self._ask("decode", (), ids=[int(i) for i in ids])
        return str(answer["text"])

    def _ask(self, action: str, texts: Sequence[bytes], **more: Any) -> tuple[dict[str, Any], bytes]:
        try:
            return self._request(action, texts, **more)
        except Refused as error:
            problem = f"the tokenizer failed ({error})"
            raise InputError(f"{self._name}: {problem}; download its files again, or name another one") from error

    def _request(self, action: str, parts: Sequence[bytes], **more: Any) -> tuple[dict[str, Any], bytes]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        head = json.dumps({"do": action, "sizes": [len(part) for part in parts], **more}).encode()
        try:
            with self._lock:
                stdin.writelines((head, b"\n", *parts))
                stdin.flush()
                answer = json_files.parse(stdout.readline())
                following = stdout.read(answer.get("size", 0))
        except (OSError, ValueError) as error:
            raise InputError(f"{self._name}: {self._explain_end()}; check that its files can be trusted") from error
        if "error" in answer:
            raise Refused(" ".join(answer["error"].split()))
        return answer, following

    def _explain_end(self) -> str:
        code = self._process.wait()
        cause = signal.Signals(-code).name if code < 0 else "too much time"
        return f"the tokenizer ended its process ({cause}): it needs too much time or memory, or crashed"


def _split(counts: Sequence[int], values: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(counts)[:-1]) if counts else []


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
