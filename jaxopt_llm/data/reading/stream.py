"""Streams of the bytes of data files, compressed or not, and the limit on the size of a document."""

import io
from typing import BinaryIO

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.find import File, is_compressed

MAX_DOCUMENT_BYTES = 2**30  # memory holds several copies of a document
_BLOCK = 2**20  # bytes read at once


def open_stream(file: File) -> BinaryIO:
    if not is_compressed(file):
        return file.path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(file.path), compression="detect"))


def check_size(where: object, document: bytes | bytearray) -> bytes:
    """Return the document. Raises InputError if it is too large."""
    if len(document) > MAX_DOCUMENT_BYTES:
        reject_size(where)
    return bytes(document)


def reject_size(where: object) -> None:
    problem = f"a document is larger than {MAX_DOCUMENT_BYTES / 2**30:g} GiB and must fit in memory"
    raise InputError(f"{where}: {problem}; split it (a text file: with --data.separator)")


def find_line(file: File, byte: int) -> int:
    """Return the line of a byte, counted from 1. Reads the file up to the byte."""
    line = 1
    with open_stream(file) as stream:
        while byte > 0 and (block := stream.read(min(byte, _BLOCK))):
            line += block.count(b"\n")
            byte -= len(block)
    return line
