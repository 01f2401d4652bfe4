"""Mutations of files for benchmarks/fuzz.py: of their bytes, and of the values of JSON."""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

EXTREMES = (0, 1, -1, 2**7, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
HUGE = (10**30, -(10**30), 10**4000, 10**5000)
VALUES: tuple[Any, ...] = (None, True, False, "", "x", "\ud800", "../../etc/passwd", [], {}, [[]], [None], [1, "a"])
# Python's json writes these as NaN and Infinity.
VALUES += (*EXTREMES, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), {"a": {"b": []}}, "[" * 50, "\0", "é" * 300)
LITERALS = (b"NaN", b"-Infinity", b"1e999", b"null", b"[]", b"{}", b'""', b"-1", b"9" * 5000, b"18446744073709551616")


# --- bytes


def flip_bits(random: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        if found:
            found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def flip_bits_at_an_end(random: random.Random, content: bytes) -> bytes:
    """Flip bits of the first or the last bytes, where headers and footers are."""
    size = min(len(content), 200)
    if random.random() < 0.5:
        return flip_bits(random, content[:size]) + content[size:]
    return content[: len(content) - size] + flip_bits(random, content[len(content) - size :])


def truncate(random: random.Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def empty(random: random.Random, content: bytes) -> bytes:
    return b""


def append(random: random.Random, content: bytes) -> bytes:
    return content + random.randbytes(random.choice((1, 8, 1000)))


def delete_range(random: random.Random, content: bytes) -> bytes:
    begin, size = random.randrange(len(content) + 1), random.choice((1, 2, 8, 100))
    return content[:begin] + content[begin + size :]


def repeat_range(random: random.Random, content: bytes) -> bytes:
    begin, size = random.randrange(len(content) + 1), random.choice((1, 8, 100))
    return content[:begin] + content[begin : begin + size] * random.choice((2, 10)) + content[begin + size :]


def insert_bytes(random: random.Random, content: bytes) -> bytes:
    begin = random.randrange(len(content) + 1)
    return (
        content[:begin]
        + random.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b'"', random.randbytes(9)))
        + (content[begin:])
    )


def set_number(random: random.Random, content: bytes) -> bytes:
    """Replace bytes by an extreme number, as in a binary header."""
    code, bits = random.choice((("<Q", 64), ("<I", 32), ("<H", 16), (">Q", 64)))
    number = struct.pack(code, random.choice(EXTREMES) % 2**bits)
    begin = random.randrange(0, max(min(len(content), 200) - len(number), 0) + 1)
    return content[:begin] + number + content[begin + len(number) :]


def nest_deeply(random: random.Random, content: bytes) -> bytes:
    depth, (opening, closing) = random.choice((60, 101, 990, 100_000)), random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    begin = random.randrange(len(content) + 1)
    nested = opening * depth + b"1" + random.choice((closing * depth, b""))
    return random.choice((nested, content[:begin] + nested + content[begin:]))


def change_literal(random: random.Random, content: bytes) -> bytes:
    """Replace a number of a text."""
    numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?", content))
    if not numbers:
        return flip_bits(random, content)
    found = random.choice(numbers)
    return content[: found.start()] + random.choice(LITERALS) + content[found.end() :]


BYTES: tuple[Mutation, ...] = (
    *(flip_bits, flip_bits_at_an_end, truncate, empty, append, delete_range, repeat_range, insert_bytes, set_number),
)
TEXT: tuple[Mutation, ...] = (
    *(flip_bits, truncate, empty, append, delete_range, repeat_range, insert_bytes, nest_deeply, change_literal),
)


# --- JSON


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value within a value."""
    found = []
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key), *places(child)]
    return found


def change_value(random: random.Random, value: Any) -> None:
    container, key = random.choice(places(value))
    old = container[key]
    if isinstance(old, (int, float)) and random.random() < 0.5:
        container[key] = random.choice((-old, old + 1, old * 1000, random.choice(HUGE), random.choice(EXTREMES)))
    elif isinstance(old, str) and random.random() < 0.3:
        container[key] = random.choice((old * 100, old[:-1], old + "\n", f"({old}", old.upper()))
    else:
        container[key] = random.choice(VALUES)


def remove_value(random: random.Random, value: Any) -> None:
    container, key = random.choice(places(value))
    del container[key]


def move_value(random: random.Random, value: Any) -> None:
    (container, key), (other, other_key) = (random.choice(places(value)) for _ in range(2))
    container[key] = json.loads(json.dumps(other[other_key]))


def add_value(random: random.Random, value: Any) -> None:
    containers = [value, *(container[key] for container, key in places(value))]
    container = random.choice([each for each in containers if isinstance(each, (dict, list))])
    added = random.choice(VALUES)
    if isinstance(container, list):
        container.append(added)
    else:
        container[random.choice(("x", "", "\ud800", *map(str, container)))] = added


def dump(value: Any) -> bytes:
    limited = json.dumps(value)
    return limited.encode()


def change_json(random: random.Random, content: bytes) -> bytes:
    """Change up to three values of a JSON text."""
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if places(value):
            random.choice((change_value, change_value, remove_value, move_value, add_value))(random, value)
    return dump(random.choice(VALUES)) if random.random() < 0.03 else dump(value)


def repeat_key(random: random.Random, content: bytes) -> bytes:
    """Write a key of an object twice."""
    keys = list(re.finditer(rb'("(?:[^"\\]|\\.)*")\s*:', content))
    if not keys:
        return flip_bits(random, content)
    found = random.choice(keys)
    return content[: found.start()] + found[1] + b": 1, " + content[found.start() :]


JSON: tuple[Mutation, ...] = (*TEXT, repeat_key, *[change_json] * len(TEXT))


def change_line(random: random.Random, content: bytes) -> bytes:
    """Change the JSON of one of several lines."""
    lines = content.splitlines()
    at = random.randrange(len(lines))
    lines[at] = random.choice(JSON)(random, lines[at])
    return b"\n".join(lines) + b"\n"


JSON_LINES: tuple[Mutation, ...] = (*TEXT, *[change_line] * len(TEXT))


def change_header(random: random.Random, content: bytes) -> bytes:
    """Change the JSON header of a safetensors file, and its length."""
    size = int.from_bytes(content[:8], "little")
    header = random.choice(JSON)(random, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


SAFETENSORS: tuple[Mutation, ...] = (*BYTES, *[change_header] * len(BYTES))
