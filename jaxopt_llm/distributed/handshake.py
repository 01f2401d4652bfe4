"""First messages of two processes of a job, each of which proves that it knows the token of the job.

The token is a secret that all processes share. It is never sent: each end signs the other's nonce together with its
message (HMAC-SHA256, RFC 2104). Without a token, the key is empty, and whoever reaches the port may speak.
"""

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.core.errors import InputError

TOKEN_VARIABLE = "JAXOPT_LLM_TOKEN"
_MOST_PROCESSES = 2**20
_LONGEST_TEXT = 1000  # characters of a text of another process in a message


@dataclass(frozen=True)
class Hello:
    """First message of a process, which says who it is.

    Attributes:
        processes: number of processes of its job.
        facts: values that must be equal in all processes, by name.
        nonce: for the answer.
    """

    index: int
    processes: int
    host: str
    facts: dict[str, Any]
    nonce: str


def read_token(config: DistributedConfig, environment: Mapping[str, str]) -> bytes:
    """Return the token of the job: that of `distributed.token_file` or of the environment; empty without either.

    Raises:
        InputError: the file cannot be read or is empty.
    """
    if not config.token_file:
        return environment.get(TOKEN_VARIABLE, "").strip().encode()
    return read_token_file(config.token_file, f"distributed.token_file={config.token_file}")


def read_token_file(file: str, setting: str) -> bytes:
    """Return the token in a file. setting: its name and value, for messages.

    Raises:
        InputError: the file cannot be read or is empty.
    """
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise InputError(f"{setting}: it cannot be read ({error.strerror}); correct the path") from error
    if not token:
        raise InputError(f"{setting}: it is empty; write a secret into it, such as the output of openssl rand -hex 32")
    return token


def make_nonce() -> str:
    return secrets.token_hex(16)


def sign(token: bytes, nonce: str, message: Any) -> dict[str, Any]:
    """Return a message with the proof that its sender knows the token."""
    return {"message": message, "proof": _prove(token, nonce, message)}


def open_signed(token: bytes, nonce: str, signed: Any) -> Any:
    """Return the message of `sign`.

    Raises:
        NotTrustedError: its sender does not know the token.
        ValueError: it is no signed message.
    """
    if not isinstance(signed, dict) or not isinstance(signed.get("proof"), str) or "message" not in signed:
        raise ValueError("not a signed message")
    if not hmac.compare_digest(signed["proof"].encode(), _prove(token, nonce, signed["message"]).encode()):
        raise NotTrustedError
    return signed["message"]


class NotTrustedError(Exception):
    """The sender of a message does not know the token."""


def _prove(token: bytes, nonce: str, message: Any) -> str:
    text = json.dumps([nonce, message], sort_keys=True)
    return hmac.new(token, text.encode(), "sha256").hexdigest()


def read_hello(message: Any) -> Hello:
    """Return the first message of a process.

    Raises:
        ValueError: it is no hello, or one with numbers out of range.
    """
    kinds = {"index": int, "processes": int, "host": str, "facts": dict, "nonce": str}
    if not isinstance(message, dict) or any(type(message.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("not a hello")
    hello = Hello(**{name: message[name] for name in kinds})
    if not 0 <= hello.index < hello.processes <= _MOST_PROCESSES:
        raise ValueError("an index or a number of processes out of range")
    return hello


def printable(value: Any) -> str:
    """Return a value of another process as a text for the terminal: short, and without control characters."""
    text = "".join(each if each.isprintable() else "?" for each in str(value))
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
