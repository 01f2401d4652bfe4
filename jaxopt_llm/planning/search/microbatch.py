"""Sizes of a microbatch in the arithmetic of memory and time."""

from jaxopt_llm.config import Config
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def count_tokens(config: Config) -> int:
    """Return the tokens of a microbatch on one device."""
    training = config.training
    rows = training.batch_size // (training.accumulation * config.mesh.batch_shards)
    return rows * training.sequence_length // config.mesh.context


def count_table_rows(config: Config) -> int:
    """Return the rows of embedding and head that a device looks up in and computes logits of.

    Pipeline stages divide these tables, too. With scores, these are the rows of their head, whole on every device.
    """
    if config.model.scores:
        return config.model.scores
    return -(-pad_vocabulary_size(config.model.vocabulary_size) // (config.mesh.tensor * config.mesh.pipeline))


def accumulates_gradients(config: Config) -> bool:
    """Return whether gradients are summed over microbatches in separate float32 arrays."""
    return config.training.accumulation > 1 or config.mesh.pipeline > 1


def adds_in_place(config: Config) -> bool:
    """Return whether a layer's gradients are added to that sum where they are formed (execution/scan.py).

    Loops over spans of layers with different precisions, and over groups of layers, form stacks of gradients first.
    """
    in_loop = config.mesh.pipeline == 1 and config.training.unroll != "all"
    is_plain = not config.precision.compute_dtype_layers and config.remat.every == 1
    return in_loop and is_plain and config.training.accumulation > 1 and config.precision.reduce_dtype == "float32"
