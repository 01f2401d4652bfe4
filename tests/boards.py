"""Reads TensorBoard's files."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def events(directory: Path) -> list[Event]:
    """Of the one file."""
    (file,) = (directory / "tensorboard").iterdir()
    return events_of(file)


def events_of(file: Path) -> list[Event]:
    """A record: its length, a checksum, its bytes, a checksum."""
    found, content = [], file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found
