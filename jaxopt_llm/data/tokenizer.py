"""Text to token ids and back."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray


class ByteTokenizer:
    """One token per byte of UTF-8: ids 0 to 255 are the bytes, the two above delimit documents."""

    beginning_of_document: Final = 256
    end_of_document: Final = 257
    vocabulary_size: Final = 258

    def encode(self, text: bytes | str) -> NDArray[np.int32]:
        """Returns ids [N] of a text, without delimiters."""
        content = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(content, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids [N]: ids above 255 are dropped, malformed UTF-8 becomes U+FFFD.

        Raises:
            ValueError: a negative id.
        """
        return bytes(i for i in ids if i < 256).decode(errors="replace")
