"""Command `evaluate`: loss of a checkpoint.

python -m jaxopt_llm.evaluate --checkpoint DIR [--step N|best] [--adapter FOLDER] [--batches N]
                              [--section.field VALUE ...]
"""

import argparse
import functools
import itertools
import math
import sys

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors
from jaxopt_llm.inference import flags

PROGRAM = errors.program_name("evaluate")


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="Compute the loss of a run's checkpoint on its validation sets or held-out documents or, with "
        "--data.paths, on all documents there. The fields of data, evaluation.paths, training.batch_size (rows at "
        "once) and training.sequence_length can be given as for jaxopt_llm.train; the run's values are the defaults.",
        allow_abbrev=False,
    )
    flags.add_model_flags(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="maximum number of batches to read (default: all)")
    return parser


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, Config, MeshConfig, RematConfig, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.rows.loader import read_in_order
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus, open_validation_sets
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.execution import scan
from jaxopt_llm.inference import models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.self_attention import describe_call
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.planning import oom
from jaxopt_llm.step.validation import validate

OVERRIDABLE = ("data.", "evaluation.paths", "training.batch_size", "training.sequence_length")


def evaluate(source: LoadedModel, rows: PackedRows, batch_size: int, max_batches: int | None) -> tuple[float, int]:
    """Compute the loss over all rows, or over the first `max_batches` batches.

    Returns:
        The mean loss per token in nats, and the number of tokens. Tokens without a loss, such as padding, do not count.

    Raises:
        InputError: no token has a loss.
    """
    loss = jax.jit(
        functools.partial(scan.loss, source.model, placement=source.placement, remat=RematConfig("none")),
        compiler_options=compiler_options(source.placement.mesh),
    )
    batch_size += -batch_size % source.placement.size(*BATCH_AXES)
    total, tokens = 0.0, 0
    for each in itertools.islice(read_in_order(rows, batch_size), max_batches):
        batch: Batch = jax.tree.map(lambda field: jnp.asarray(field[None]), each)
        total += float(loss(source.params, batch)[0])
        tokens += int(np.sum(batch.loss_mask))
    if not tokens:
        raise InputError("the data has no token to predict: give documents of at least two tokens")
    return total / tokens, tokens


def main() -> int:
    options, overrides = make_parser().parse_known_args(sys.argv[1:])
    if options.batches is not None and options.batches < 1:
        raise InputError(f"--batches {options.batches}: must be at least 1")
    quantisation = flags.read_quantisation(options)
    named = {argument.split("=")[0].replace("_", "-") for argument in overrides}
    reads_other_data = "--data.paths" in named
    trained = models.open_config(options.checkpoint, options.base, options.family)
    is_folder = not is_run_directory(options.checkpoint)
    if is_folder and not named & {"--data.paths", "--evaluation.paths"}:
        problem = "a model folder has no held-out documents"
        raise InputError(f"--checkpoint {options.checkpoint}: {problem}; name the documents with --data.paths")
    config = _override(trained, overrides, reads_other_data)
    length = config.training.sequence_length
    if is_folder and "--training.sequence-length" not in named:
        limit = f"at most {models.MAX_ROW_TOKENS:,}"
        print(
            f"rows of {length:,} tokens, the model's context, {limit}: see --training.sequence-length", file=sys.stderr
        )
    # Not the implementation that the run used, because this may be another machine.
    call = describe_call(config.model, config.precision.compute_dtype, length, None, parts=1)
    attention = choose_attention(visible_devices()[0], "auto", call)
    if attention.reason:
        print(f"attention: {attention}", file=sys.stderr)
    with oom.explain_oom("loading the checkpoint", "use a GPU with more memory"):
        source = models.load_model(
            options.checkpoint,
            config.data,
            attention=attention.name,
            adapter=options.adapter,
            step=options.step,
            base=options.base,
            quantisation=quantisation,
            family=options.family,
        )
    model = f"step {source.step}"
    if options.adapter:
        model = f"the adapters {options.adapter}" + ("" if is_folder else f" over {model}")
    for name, documents in _open_documents(config, source.tokenizer, reads_other_data).items():
        size, data = config.model.vocabulary_size, config.data
        rows = PackedRows(documents, length, size, name, data.long_documents, data.documents_per_row)
        if rows.pairs:
            raise InputError(
                f"{name} holds pairs of a chosen and a rejected answer, which have no loss per token: the held-out "
                "losses of the run are in its metrics.jsonl; name other documents with --data.paths FILE "
                "--data.content text"
            )
        if rows.summary:  # of conversations: how many are cut
            print(rows.summary, file=sys.stderr)
        with oom.explain_oom("evaluating", "set a smaller --training.batch-size or --training.sequence-length"):
            loss, tokens = evaluate(source, rows, config.training.batch_size, options.batches)
        read = f"{tokens:,} tokens" if options.batches is None else f"read {tokens:,} of {documents.size:,} tokens"
        print(
            f"{model} on {name} ({documents}): {loss:.4f} nats per token, "
            f"perplexity {math.exp(min(loss, 700)):.4g}, {read}"
        )
    return 0


def _open_documents(config: Config, tokenizer: Tokenizer, all_of_paths: bool) -> dict[str, TokenStream]:
    """Return the documents to evaluate by name: all of data.paths, the validation sets, or the held-out split."""
    if all_of_paths:
        stream, skipped = open_all_documents(config.data, tokenizer)
        _print_notes(skipped)
        return {", ".join([*config.data.paths, *skipped.describe()]): stream}
    if sets := open_validation_sets(config.evaluation, config.data, tokenizer):
        for each in sets:
            _print_notes(each.skipped)
        return {f"the validation set {each.name}": each.documents for each in sets}
    if not config.evaluation.holds_out:
        raise InputError(
            f"--checkpoint {config.run.directory}: with evaluation.every=0 it was trained on all its documents; name "
            "others with --data.paths"
        )
    corpus = open_corpus(config.data, tokenizer)
    _print_notes(corpus.skipped)
    assert corpus.held_out is not None
    return {"the held-out split": corpus.held_out}


def _print_notes(skipped: Skipped) -> None:
    for note in skipped.describe_notes():
        print(note, file=sys.stderr)


def _override(trained: Config, overrides: list[str], reads_other_data: bool) -> Config:
    """Return the configuration of a run with the overrides of the command line, validated."""
    # Evaluation runs without the mesh, the microbatches and the remat groups of the run, so the batch and the layers
    # need not be divisible by them.
    trained = fields.replace_fields(trained, {"training.accumulation": 1, "mesh": MeshConfig(), "remat": RematConfig()})
    if reads_other_data:  # data.weights belong to the paths of the run
        trained = fields.replace_fields(trained, {"data.weights": (), "data.format": "auto"})
    config = cli.override_config(trained, overrides, PROGRAM, errors.list_flags(make_parser()))
    validate(config)
    for name in fields.FIELDS:
        if not name.startswith(OVERRIDABLE) and fields.get_field(trained, name) != fields.get_field(config, name):
            changeable = "data.*, evaluation.paths, training.batch_size and training.sequence_length"
            raise InputError(f"--{name}: the checkpoint determines it; leave it out, and change only {changeable}")
    return config


if __name__ == "__main__":
    errors.run_command(main)
