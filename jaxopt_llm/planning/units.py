"""Units of bytes in tables."""

GIB = 2**30


def choose_unit(size: int) -> tuple[str, int]:
    """Return the name and the bytes of the unit in which a table of parts of `size` bytes is printed."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)
