"""Command `evaluate`: loss or scores of documents, or results in tasks of the lm-evaluation-harness.

python -m jaxopt_llm.evaluate --checkpoint DIR [--step N|best] [--adapter FOLDER] [--batches N]
                              [--section.field VALUE ...]
python -m jaxopt_llm.evaluate --checkpoint DIR [--step N|best] [--adapter FOLDER] --tasks NAME,... [--num-fewshot N] ...
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from datetime import UTC, datetime
from pathlib import Path

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors
from jaxopt_llm.inference import flags

PROGRAM = errors.program_name("evaluate")


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=PROGRAM,
        description="Compute the loss of a run's checkpoint on its validation sets or held-out documents or, with "
        "--data.paths, on all documents there. The fields of data, evaluation.paths, training.batch_size (rows at "
        "once) and training.sequence_length can be given as for jaxopt_llm.train; the run's values are the defaults. "
        "With --tasks, evaluate it on tasks of EleutherAI's lm-evaluation-harness instead.",
        allow_abbrev=False,
    )
    flags.add_model_flags(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="maximum number of batches to read (default: all)")
    _add_task_flags(parser)
    return parser


def _add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of tasks, named as in the harness's own command."""
    add = parser.add_argument_group("tasks of the lm-evaluation-harness").add_argument
    tasks = "tasks, groups and tags, separated by commas; wildcards are allowed"
    add("--tasks", type=lambda names: tuple(names.split(",")), metavar="NAME,...", help=tasks)
    add("--num-fewshot", type=errors.whole, metavar="N", help="examples in each prompt (default: the task's)")
    limit = "number of documents of each task, or their share if below 1, for a first look (default: all)"
    add("--limit", type=_parse_limit, metavar="N", help=limit)
    add("--include-path", type=Path, metavar="DIR", help="folder with YAML files of further tasks")
    template = "write prompts with the chat template of the tokenizer; see --data.chat-template"
    add("--apply-chat-template", action="store_true", help=template)
    turns = "make the examples turns of the conversation (default: with --apply-chat-template)"
    add("--fewshot-as-multiturn", action=argparse.BooleanOptionalAction, help=turns)
    add(
        "--system-instruction", metavar="TEXT", help="system message, or text in front of the prompt without a template"
    )
    add("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run code that the model writes")
    output = (
        "file for the results in JSON (default: evaluations/ in the run directory; none for a model folder), or for "
    )
    output += "the scores of documents by a model with scores, a line for each"
    add("--output", type=Path, metavar="FILE", help=output)


def _parse_limit(text: str) -> float:
    """Return a number of documents, or a share of them."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < math.inf or (limit >= 1 and limit % 1):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of documents, or a share between 0 and 1")
    return limit


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.pretrained import find_class_names
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, Config, MeshConfig, RematConfig, fields
from jaxopt_llm.config.data import PROMPT, UNPAIRED
from jaxopt_llm.config.training import NEXT_TOKEN
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.rows.loader import read_in_order
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.corpus import HELD, open_all_documents, open_corpus, open_validation_sets
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import Tokenizer
from jaxopt_llm.execution import scan
from jaxopt_llm.inference import document_scores, models
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import OBJECTIVE
from jaxopt_llm.observe.report.run_files import EVALUATIONS
from jaxopt_llm.planning import oom
from jaxopt_llm.run.setup import check_classes, check_label_names
from jaxopt_llm.step.validation import validate

TASK_FLAGS = {"evaluation.tasks": "--tasks", "evaluation.task_folder": "--include-path"}  # by the setting of a run
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
        total += float(loss(source.params, batch)[OBJECTIVE])
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
    _check_mode(options, named, is_folder, trained.model.scores > 0)
    config = _override(trained, overrides, reads_other_data)
    if options.tasks is None and trained.data.content == PROMPT and not reads_other_data:
        raise InputError(
            f"--checkpoint {options.checkpoint}: prompts without answers have no loss: what the run measured of its "
            "answers is in its metrics.jsonl; name other documents with --data.paths FILE"
        )
    if options.tasks is not None:
        length = config.training.sequence_length
        if is_folder and "--training.sequence-length" not in named:
            length = huggingface.read_context(hub.find_folder(options.checkpoint, "--checkpoint ")) or length
        with errors.own_flags(TASK_FLAGS):
            return _evaluate_tasks(options, config, length, quantisation)
    if config.model.scores > 1 and config.data.label_field:
        as_base = fields.replace_fields(config, {"model.pretrained": str(options.checkpoint)})
        config = _name_classes(config, find_class_names(as_base))
    length = config.training.sequence_length
    if is_folder and "--training.sequence-length" not in named:
        limit = f"at most {models.MAX_ROW_TOKENS:,}"
        print(
            f"rows of {length:,} tokens, the model's context, {limit}: see --training.sequence-length", file=sys.stderr
        )
    source = _load_model(options, config, length, quantisation)
    model = _describe_model(options, source, is_folder)
    for name, documents in _open_documents(config, source.tokenizer, reads_other_data).items():
        size, data = config.model.vocabulary_size, config.data
        scored = config.model.scores > 0
        stream, most = documents.without("teacher"), data.documents_per_row
        rows = PackedRows(stream, length, size, name, data.long_documents, most, scored)
        if rows.pairs and not scored:
            raise InputError(
                f"{name} holds {HELD[rows.pairs]}, which have no loss per token: the held-out "
                "losses of the run are in its metrics.jsonl; name other documents with --data.paths FILE "
                "--data.content text"
            )
        if rows.summary:  # of conversations: how many are cut
            print(rows.summary, file=sys.stderr)
        if scored:
            found = _evaluate_scores(options, config, source, rows)
            print(f"{model} on {name} ({documents}): {found}")
            continue
        with oom.explain_oom("evaluating", "set a smaller --training.batch-size or --training.sequence-length"):
            loss, tokens = evaluate(source, rows, config.training.batch_size, options.batches)
        part = "" if options.batches is None else f", with --batches {options.batches}"
        print(
            f"{model} on {name} ({documents}): {loss:.4f} nats per token, "
            f"perplexity {math.exp(min(loss, 700)):.4g}, over the {tokens:,} tokens that the loss counts{part}"
        )
    return 0


def _name_classes(config: Config, names: tuple[str, ...]) -> Config:
    """Return the configuration with the names of the model's classes.

    Raises:
        InputError: the configuration or the documents have other names.
    """
    given = config.data.label_names
    if names and given not in ((), names):
        raise InputError(
            f"--data.label-names {' '.join(given)}: the model has the classes {', '.join(names)}, in this order; leave "
            "the names out"
        )
    config = fields.replace_fields(config, {"data.label_names": names or given})
    check_label_names(config)
    return config


def _evaluate_scores(options: argparse.Namespace, config: Config, source: LoadedModel, rows: PackedRows) -> str:
    """Return how the scores of documents agree with what is known of them, and write the scores, if that is asked."""
    if rows.pairs == UNPAIRED:
        raise InputError(
            f"{rows.name} holds {HELD[UNPAIRED]}, which a reward model does not compare: name rows with chosen and "
            "rejected, and set --data.content preference"
        )
    if rows.stream.holds("labels") and config.model.scores > 1:
        check_classes(rows, config.model.scores)
    with oom.explain_oom("evaluating", "set a smaller --training.batch-size or --training.sequence-length"):
        found = document_scores.read_scores(source, rows, config.training.batch_size)
    if options.output is not None:
        document_scores.write_scores(found, options.output)
        print(f"scores: {options.output}", file=sys.stderr)
    return document_scores.describe_scores(found, rows)


def _check_mode(options: argparse.Namespace, named: set[str], is_folder: bool, has_scores: bool) -> None:
    """Raise InputError if flags of losses and of tasks are mixed, or if there are no documents."""
    of_data = named & {"--data.paths", "--evaluation.paths"}
    if options.tasks is None:
        of_tasks = ["num_fewshot", "limit", "include_path", "fewshot_as_multiturn", "system_instruction"]
        of_tasks.append("batches" if has_scores else "output")
        given = [name for name in of_tasks if getattr(options, name) is not None]
        given += [name for name in ("apply_chat_template", "confirm_run_unsafe_code") if getattr(options, name)]
        if given:
            applies = "the loss of documents" if given == ["batches"] else "tasks: add --tasks NAME"
            raise InputError(f"--{given[0].replace('_', '-')} applies to {applies}, or leave it out")
        if is_folder and not of_data:
            problem = "a model folder has no held-out documents"
            raise InputError(
                f"--checkpoint {options.checkpoint}: {problem}; name the documents with --data.paths, or tasks with "
                "--tasks"
            )
        return
    for flag in sorted(of_data) + ["--batches"] * (options.batches is not None):
        raise InputError(f"{flag} applies to the loss of documents: leave it out, or leave out --tasks")
    if options.fewshot_as_multiturn and not options.apply_chat_template:
        raise InputError("--fewshot-as-multiturn needs turns of a conversation: add --apply-chat-template")


def _load_model(
    options: argparse.Namespace, config: Config, length: int, quantisation: flags.Quantisation | None
) -> LoadedModel:
    """Load the model for rows of this length, which all devices read."""
    attention = models.choose_local_attention(config, length)
    with oom.explain_oom("loading the checkpoint", "use a GPU with more memory"):
        source = models.load_model(
            options.checkpoint,
            config.data,
            attention=attention,
            adapter=options.adapter,
            step=options.step,
            base=options.base,
            quantisation=quantisation,
            family=options.family,
            predicts_tokens=options.tasks is not None,
        )
        return models.use_all_devices(source)


def _describe_model(options: argparse.Namespace, source: LoadedModel, is_folder: bool) -> str:
    model = f"step {source.step}"
    if options.adapter:
        model = f"the adapters {options.adapter}" + ("" if is_folder else f" over {model}")
    return model


def _evaluate_tasks(
    options: argparse.Namespace, config: Config, length: int, quantisation: flags.Quantisation | None
) -> int:
    """Evaluate the model on tasks, print their tables, and write the results. length: tokens of the context."""
    harness = flags.import_harness()
    if options.fewshot_as_multiturn is None:
        options.fewshot_as_multiturn = options.apply_chat_template
    names = [field.name for field in dataclasses.fields(harness.Options)]  # those of the flags, too
    tasks = harness.Tasks(harness.Options(**{name: getattr(options, name) for name in names}))
    source = _load_model(options, config, length, quantisation)
    batch_tokens = config.training.batch_size * config.training.sequence_length
    model = harness.HarnessModel(source, length, batch_tokens, options.apply_chat_template)
    with oom.explain_oom("evaluating", "set a smaller --training.batch-size or --training.sequence-length"):
        results = harness.run_tasks(model, tasks)
    results["jaxopt_llm"] |= {
        "checkpoint": options.checkpoint,
        "adapter": options.adapter,
        "quantise": options.quantise,
    }
    for kind, count in results["jaxopt_llm"]["cut_requests"].items():
        if count:
            problem = f"{count:,} requests were longer than the context of {length:,} tokens and lost their beginning"
            print(f"{kind}: {problem}; see --training.sequence-length", file=sys.stderr)
    print(harness.describe_results(results))
    file = options.output
    if file is None and is_run_directory(options.checkpoint):
        file = options.checkpoint / EVALUATIONS / f"step-{source.step}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    if file is not None:
        harness.write_results(results, file)
        print(f"results: {file}", file=sys.stderr)
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
    if trained.training.distills or trained.draws:  # the loss is that of the next token, without the teacher
        trained = fields.replace_fields(trained, {"training.objective": NEXT_TOKEN})
    if trained.data.content == PROMPT:
        trained = fields.replace_fields(trained, {"data.content": "text", "data.paths": ()})
    if reads_other_data:  # data.weights belong to the paths of the run
        trained = fields.replace_fields(trained, {"data.weights": (), "data.format": "auto"})
    config = cli.override_config(trained, overrides, PROGRAM, errors.list_flags(make_parser()))
    validate(_without_scores(_without_conversations(config)))
    for name in fields.FIELDS:
        if not name.startswith(OVERRIDABLE) and fields.get_field(trained, name) != fields.get_field(config, name):
            changeable = "data.*, evaluation.paths, training.batch_size and training.sequence_length"
            raise InputError(f"--{name}: the checkpoint determines it; leave it out, and change only {changeable}")
    return config


def _without_conversations(config: Config) -> Config:
    """Return a configuration of texts without settings of conversations, to validate: tasks may have conversations."""
    if config.data.content != "text":
        return config
    of_chats = {"data.chat_template": "", "data.template_arguments": (), "data.date": "", "data.learn_turns": "all"}
    texts: Config = fields.replace_fields(config, of_chats)
    return texts


def _without_scores(config: Config) -> Config:
    """Return a configuration that predicts tokens, to validate: scores need no objective, and no labels."""
    if not config.model.scores:
        return config
    return fields.replace_fields(
        config, {"model.scores": 0, "training.objective": NEXT_TOKEN, "data.label_field": "", "training.trainable": ()}
    )


if __name__ == "__main__":
    errors.run_command(main)
