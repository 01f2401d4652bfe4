"""Reader of TensorBoard event files."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def events(directory: Path) -> list[Event]:
    """Return the events of the only file in the folder."""
    (file,) = (directory / "tensorboard").iterdir()
    return events_of(file)


def events_of(file: Path) -> list[Event]:
    """Parse a file of records. A record is its length, a checksum, its bytes, and a checksum."""
    found, content = [], file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found
