"""Format of blocks of codes: values that share a scale, for collectives of JAX and for messages without it."""

from typing import Literal

Bits = Literal[4, 8]
BLOCK_SIZES = (128, 64, 32)  # values that share a float32 scale: 3% of the bytes of int8 codes, then 6% and 12%
MAX_CODES: dict[Bits, int] = {8: 127, 4: 7}  # symmetric, with a code for 0
