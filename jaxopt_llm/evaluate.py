"""python -m jaxopt_llm.evaluate --checkpoint RUN_DIR [--batches N] [--data.paths PATH ...] [--section.field VALUE]"""

import dataclasses
import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, oom, run
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.data.corpus import open_corpus, open_whole
from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model.attention import kernel_head_dim
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.parallel.mesh import BATCH_AXES, MeshConfig, visible_devices
from jaxopt_llm.parallel.topology import choose_attention
from jaxopt_llm.parallel.xla_options import compiler_options
from jaxopt_llm.run import Run
from jaxopt_llm.validation import validate

PROGRAM = "python -m jaxopt_llm.evaluate"
MAY_DIFFER = ("data.", "training.batch_size", "training.sequence_length")


def evaluate(source: Run, rows: PackedRows, batch_size: int, most: int | None) -> tuple[float, int]:
    """Mean loss per real token, in nats, and the number of these, over all rows or the first `most` batches."""
    loss = jax.jit(
        functools.partial(scan.loss, source.parts, placement=source.placement, remat=RematConfig("none")),
        compiler_options=compiler_options(source.placement.mesh),
    )
    batch_size += -batch_size % source.placement.size(*BATCH_AXES)
    total, tokens = 0.0, 0
    batches = -(-len(rows) // batch_size)
    for number in range(batches if most is None else min(most, batches)):
        of_batch = [rows[row] for row in range(number * batch_size, min((number + 1) * batch_size, len(rows)))]
        # The last batch is filled up with rows of nothing: one program serves all.
        nothing = jax.tree.map(np.zeros_like, of_batch[0])
        of_batch += [nothing] * (batch_size - len(of_batch))
        batch: Batch = jax.tree.map(lambda *fields: jnp.asarray(np.stack(fields)[None]), *of_batch)
        total += float(loss(source.params, batch)[0])
        tokens += int(np.sum(batch.loss_mask))
    if not tokens:
        raise InputError("nothing to predict there: no document has a token after its first")
    return total / tokens, tokens


def main() -> int:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="The loss of a run's last checkpoint on its own held-out documents or, with --data.paths, on all "
        "documents there. Fields of data, training.batch_size (rows at once) and training.sequence_length may be given "
        "as to jaxopt_llm.train; the run's are the defaults.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a training run's, or a Hugging Face model's"
    )
    parser.add_argument("--batches", type=int, metavar="N", help="most batches to read (default: all)")
    own, overrides = parser.parse_known_args(sys.argv[1:])
    if own.batches is not None and own.batches < 1:
        raise InputError(f"--batches {own.batches}: must be at least 1")
    trained = run.open_config(own.checkpoint)
    elsewhere = any(argument.split("=")[0] == "--data.paths" for argument in overrides)
    # A batch need not divide as the run's had to, nor its layers as its backward wanted them.
    whole = dataclasses.replace(trained.training, accumulation=1)
    trained = dataclasses.replace(trained, training=whole, mesh=MeshConfig(), remat=RematConfig())
    if elsewhere:  # the weights are of the run's own paths
        trained = dataclasses.replace(trained, data=dataclasses.replace(trained.data, weights=(), format="auto"))
    config = configuration.override(trained, overrides, PROGRAM)
    _check(trained, config)
    length, size = config.training.sequence_length, config.model.vocabulary_size
    # Whatever the run's was: this may be another machine.
    attention = choose_attention(
        visible_devices()[0], "auto", kernel_head_dim(config.model), config.precision.compute_dtype, length
    )
    if attention.reason:
        print(f"attention: {attention}", file=sys.stderr)
    with oom.remedied("loading the checkpoint", "take a GPU with more"):
        source = run.load(own.checkpoint, config.data, attention=attention.name)
    if elsewhere:
        stream, skipped = open_whole(config.data, source.tokenizer)
        what = f"{', '.join(config.data.paths)}{''.join(f', {count:,} {why}' for why, count in skipped.items())}"
    else:
        stream, what = open_corpus(config.data, source.tokenizer).held_out, "the held-out split"
    rows = PackedRows(stream, length, size, what, config.data.long_documents)
    with oom.remedied("evaluating", "set --training.batch-size or --training.sequence-length smaller"):
        loss, tokens = evaluate(source, rows, config.training.batch_size, own.batches)
    print(
        f"step {source.step} on {what} ({stream}): {loss:.4f} nats per token, "
        f"perplexity {math.exp(min(loss, 700)):.4g}, {tokens:,} tokens"
    )
    return 0


def _check(trained: TrainConfig, config: TrainConfig) -> None:
    validate(config)
    changed = [
        name for name in configuration.FIELDS if configuration.get(trained, name) != configuration.get(config, name)
    ]
    fixed = [name for name in changed if not name.startswith(MAY_DIFFER)]
    if fixed:
        raise InputError(
            f"--{fixed[0]}: the checkpoint has its own; only data.*, training.batch_size and "
            "training.sequence_length may differ"
        )


if __name__ == "__main__":
    errors.run(main)
