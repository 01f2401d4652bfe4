"""Documents of text files."""

import math
from collections.abc import Iterator
from typing import BinaryIO

from jaxopt_llm.data.reading import stream
from jaxopt_llm.data.reading.find import File, is_compressed
from jaxopt_llm.data.reading.rows import Part, Row, RowEncoder
from jaxopt_llm.data.reading.skipped import Position

_BLOCK = 2**18  # bytes read at once in the search for documents


def read_text_rows(part: Part, encoder: RowEncoder) -> Iterator[Row]:
    config = encoder.config
    with stream.open_stream(part.file) as source:
        if not config.separator:
            fits = not is_compressed(part.file) and part.last <= stream.MAX_DOCUMENT_BYTES
            content = source.read(-1 if fits else stream.MAX_DOCUMENT_BYTES + 1)
            yield Position(part.file), stream.check_size(part.file, content)
            return
        separator = config.separator.encode()
        is_last_part = is_compressed(part.file) or part.last == part.file.path.stat().st_size
        last = math.inf if is_last_part else part.last  # an empty document may start at the end of the file
        for start, document in _split_text(source, part.first, last, separator, part.file):
            yield Position(part.file, "byte", start), document


def _split_text(source: BinaryIO, first: int, last: float, separator: bytes, file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the start and content of the documents that start in bytes [first, last).

    The documents are the same as if the complete file had been split at once.
    """
    at = _find_safe_start(source, first - len(separator), separator) if first else 0
    if first:
        source.seek(at)
    rest, searched = bytearray(), 0  # bytes from `at`, and how many of them are known to hold no separator
    for block in iter(lambda: source.read(_BLOCK), b""):
        rest += block
        done = 0
        while (end := rest.find(separator, searched)) >= 0:
            if first <= at + done:
                yield at + done, bytes(rest[done:end])
            searched = done = end + len(separator)
            if at + done >= last:
                return
        if at + done < first and at + len(rest) - len(separator) >= last:
            return  # one document covers the whole part
        del rest[:done]
        at, searched = at + done, max(len(rest) - len(separator) + 1, 0)
        if len(rest) > stream.MAX_DOCUMENT_BYTES:
            stream.reject_size(Position(file, "byte", at))
    if first <= at:
        yield at, bytes(rest)


def _find_safe_start(source: BinaryIO, at: int, separator: bytes) -> int:
    """Return the last byte up to `at` that is certainly not inside a separator.

    Occurrences of a separator can overlap, for example two newlines in a sequence of three, and then the first one
    counts. So only an occurrence without another one just before it is certainly a separator.
    """
    while at > 0:
        first = max(at - len(separator) + 1, 0)
        source.seek(first)
        found = source.read(at - first + len(separator) - 1).rfind(separator)
        if found < 0:
            return at
        at = first + found
    return 0
