"""Setup of a run: data, devices and program, checked before anything is compiled or allocated."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxopt_llm.checkpoint.pretrained import TEACHER, find_class_names
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import Config, TrainingConfig, fields
from jaxopt_llm.config.data import PREFERENCE, UNPAIRED
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.training import CLASSIFY, KTO, OVER_PAIRS
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.reading.labels import find_label_names
from jaxopt_llm.data.reading.storage import check_backends
from jaxopt_llm.data.rows.loader import Loader, read_validation_batches
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.rows.prompts import Prompts, open_prompts
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import HELD, Corpus, ValidationSet, open_corpus, open_validation_sets
from jaxopt_llm.data.tokens.pieces import StoredLogProbabilities, TokenStream
from jaxopt_llm.data.tokens.prepared import find_prepared
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.kernels import attention_triton
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.observe import dashboards
from jaxopt_llm.parallel.mesh import LocalRows, make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.attention_choice import resolve_attention
from jaxopt_llm.run.directory import (
    Started,
    check_directory_is_free,
    check_run_directory,
    check_tokenizer_of_run,
    check_tokenizer_of_teacher,
    hash_functions,
    read_decay_steps,
    read_started,
    stores_frozen_weights,
)
from jaxopt_llm.step.program import Program, StoredTeacher, make_program

HELD_OUT = "held-out"  # name of the validation set that is split off the training data


@dataclass(frozen=True)
class Documents:
    """Documents of a run.

    Attributes:
        corpus: the documents that `data.*` names.
        sets: the documents of `evaluation.paths`.
    """

    tokenizer: Tokenizer
    corpus: Corpus
    sets: tuple[ValidationSet, ...]


@dataclass(frozen=True)
class Data(Documents):
    """Documents of a run, packed into rows.

    Attributes:
        training: rows of the training split, one entry for each source.
        validation: rows of each validation set by name, or of the held-out split.
        reference: the model whose log-probabilities all rows hold; None: they hold none, or the objective needs none.
        teacher: the same of a teacher.
    """

    training: tuple[PackedRows, ...]
    validation: dict[str, PackedRows]
    reference: StoredLogProbabilities | None
    teacher: StoredLogProbabilities | None

    def program_of(self, config: Config, placement: Placement) -> Program:
        """Return the program of a configuration whose steps read these rows; see step/program.py."""
        held = self.teacher
        stored = None if held is None else StoredTeacher(held.top_k, held.vocabulary_size)
        return make_program(config, placement, stores_frozen_weights(config), stored)


@dataclass(frozen=True)
class Setup:
    """Everything that a run needs before it compiles.

    Attributes:
        local_rows: rows of each batch that this process reads.
        loader: batches of the training split.
        validation: batches of an evaluation, for each validation set by name.
        started: the run that continues; None for a new one.
        prompts: those that the model answers itself; None unless the objective wants it.
        functions: see `hash_functions`.
    """

    config: Config
    processes: Processes
    data: Data
    placement: Placement
    program: Program
    local_rows: LocalRows
    loader: Loader
    validation: dict[str, Sequence[Batch]]
    started: Started | None
    prompts: Prompts | None
    functions: Mapping[str, str]

    @property
    def directory(self) -> Path:
        return Path(self.config.run.directory)

    def with_config(self, config: Config) -> "Setup":
        """Return the setup with another configuration of the same data, mesh and train state."""
        placement = replace(self.placement, sharding=config.sharding)
        program = self.data.program_of(config, placement)
        program = replace(program, attention=self.program.attention)
        return replace(self, config=config, placement=placement, program=program)


def check_inputs(config: Config, first: bool) -> None:
    """Raise InputError if data or a package is missing, before the run directory exists.

    first: whether this is the first process, which writes the dashboards.
    """
    check_directory_is_free(Path(config.run.directory))
    if config.model.pretrained and not config.data.paths:
        raise InputError(
            f"data.paths: name the data on which to train {config.model.pretrained}, files, folders or globs, with "
            "--data.paths"
        )
    if config.training.attention == "triton" and (problems := attention_triton.installation_problems()):
        raise InputError(f"training.attention=triton: {'; '.join(problems)}")
    if first:
        dashboards.import_packages(config.logging)
    check_backends(config.data.paths, "data.paths")
    check_backends([path for _, path in config.evaluation.named_paths()], "evaluation.paths")


def prepare_run(requested: Config, processes: Processes) -> Setup:
    """Open the data, and make the mesh and the program.

    Raises:
        InputError: the data cannot be read, the run directory holds another run, or processes differ in something that
            must be equal.
    """
    is_open = requested.mesh.context > 1 and requested.sharding.context_exchange == AUTO
    assert not is_open, "planning/exchanges.py resolves `auto` before"
    processes.check_shared(Path(requested.run.directory))
    check_hub_commits(requested, processes)
    requested = resolve_label_names(requested, processes.main)
    documents = open_documents(requested, processes)
    mesh, started = make_mesh(requested.mesh), read_started(Path(requested.run.directory))
    resolved, attention = resolve_attention(
        requested, mesh.devices.flat[0], documents.corpus.sources, processes, started
    )
    data = pack_documents(resolved, documents, processes.main)
    prompts = None
    if resolved.draws:
        prompts = open_prompts(resolved, data.training, [*data.validation.values()], data.tokenizer)
    if resolved.training.has_reference:
        reference = "base" if data.reference is None else "stored"
        resolved = fields.replace_fields(resolved, {"preference.reference": reference})
    config: Config = resolve_length(resolved, _count_steps(resolved, data, prompts))
    functions = processes.channel("functions").share(lambda: hash_functions(config))
    check_run_directory(config, data.corpus, data.tokenizer, functions)
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = data.program_of(config, placement)
    program = replace(program, attention=attention)
    local_rows, size = LocalRows(program.batch.tokens.shape, program.batch_sharding), config.training.batch_size
    weights = [source.weight for source in data.corpus.sources]
    loader = Loader(data.training, weights, size, config.run.seed, local_rows.indices)
    validation: dict[str, Sequence[Batch]] = {
        name: read_validation_batches(packed, size, config.evaluation.batches, local_rows.indices)
        for name, packed in data.validation.items()
    }
    return Setup(
        config, processes, data, placement, program, local_rows, loader, validation, started, prompts, functions
    )


def check_hub_commits(config: Config, processes: Processes) -> None:
    """Download the models of the Hugging Face hub, and check that all processes have the same commit of each.

    Raises:
        InputError: a model cannot be downloaded, or a branch changed between the downloads of two processes.
    """
    names = {
        "model.pretrained": config.model.pretrained,
        "lora.pretrained": config.lora.pretrained,
        TEACHER: config.distillation.teacher if config.runs_teacher else "",
    }
    for setting, name in names.items():
        if hub.is_hub_id(name):
            commit = hub.find_folder(name, f"{setting}=", pulse=processes.main).name
            processes.check_same(setting, commit, f"name a commit: {hub.repository(name)}@{commit}")


def resolve_label_names(config: Config, pulse: Pulse = UNWATCHED) -> Config:
    """Return the configuration with `data.label_names`, if the labels of classes have names.

    Raises:
        InputError: the data have other names than the model or each other, or another number of classes.
    """
    data, scores = config.data, config.model.scores
    if config.training.objective != CLASSIFY or scores == 1 or not data.label_field:
        return config
    names = data.label_names or find_class_names(config)
    names = find_label_names(replace(data, label_names=names), pulse=pulse)
    if names and len(names) != scores:
        classes = f"{len(names)} classes ({', '.join(names)})"
        raise InputError(
            f"data.label_field={data.label_field}: the data have {classes}, and model.scores={scores}; set "
            f"--model.scores {len(names)}"
        )
    named: Config = fields.replace_fields(config, {"data.label_names": names})
    check_label_names(named, pulse)
    return named


def check_label_names(config: Config, pulse: Pulse = UNWATCHED) -> None:
    """Raise InputError if documents to train on or to evaluate have other classes than `data.label_names`."""
    if config.data.label_names:
        held_out = tuple(path for _, path in config.evaluation.named_paths())
        for setting, paths in (("data.paths", config.data.paths), ("evaluation.paths", held_out)):
            find_label_names(replace(config.data, paths=paths, weights=()), setting, pulse)


def _count_steps(config: Config, data: Data, prompts: Prompts | None) -> float:
    """Return the number of steps that read every training row once, or answer every prompt once."""
    if prompts is not None:
        return len(prompts.training) * config.rollouts.updates / config.rollouts.prompts
    return sum(map(len, data.training)) / config.training.batch_size


def resolve_length(config: Config, epoch: float) -> Config:
    """Return the configuration with `training.steps` and `schedule.decay_steps` in place of what stands for them.

    A run that continues keeps the `decay_steps` of its first start.

    Args:
        epoch: steps of a pass over the training rows.

    Raises:
        InputError: the stored `decay_steps` does not fit to the schedule.
    """
    training, schedule = config.training, config.schedule
    steps = training.steps or math.ceil(training.epochs * epoch)
    stored = None if schedule.decay_steps else read_decay_steps(Path(config.run.directory))
    lengths = {"training.steps": steps, "training.epochs": 0.0}
    config = fields.replace_fields(config, lengths | {"schedule.decay_steps": stored or schedule.choose_end(steps)})
    if problems := config.schedule.problems():
        raise InputError("; ".join(problems))
    return config


def open_documents(config: Config, processes: Processes) -> Documents:
    """Open the corpus and the tokenizer, and check that all processes read the same data.

    Raises:
        InputError: the data cannot be read, differs between processes, has more tokens than the model's vocabulary, or
            was prepared with different chat templates.
    """
    source = config.model.pretrained
    tokenizer = load_tokenizer(config.data)
    if source and is_run_directory(Path(source)):
        check_tokenizer_of_run(config, tokenizer)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        flag = "resize-vocabulary" if source else "vocabulary-size"
        raise InputError(
            f"model.vocabulary_size={config.model.vocabulary_size}: the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.vocabulary_size} tokens; set --model.{flag} {tokenizer.vocabulary_size}"
        )
    if config.runs_teacher:
        check_tokenizer_of_teacher(config, tokenizer)
    evaluation = config.evaluation
    sets = open_validation_sets(evaluation, config.data, tokenizer, processes.main) if evaluation.every else ()
    corpus = open_corpus(config.data, tokenizer, evaluation.holds_out, processes.main)
    prepared.read_template(find_prepared(corpus.files))  # keep_tokenizer needs a single one
    processes.check_same("data.paths", corpus.sha256)
    processes.check_same("evaluation.paths", ",".join(each.sha256 for each in sets))
    return Documents(tokenizer, corpus, sets)


def _check_objective(config: Config, rows: PackedRows) -> None:
    """Raise InputError unless rows hold pairs of answers and labels if the objective needs them, and only then."""
    training, stream, scores = config.training, rows.stream, config.model.scores
    if rows.pairs != training.pairs:
        raise InputError(_describe_other_pairs(training, rows))
    if not training.reads_scores or stream.holds("labels") == bool(config.data.label_field):
        if training.objective == "classify" and scores > 1:
            check_classes(rows, scores)
        return
    if stream.holds("labels"):
        raise InputError(f"{rows.name} has labels: name their column with --data.label-field")
    raise InputError(
        f"data.label_field={config.data.label_field}: {rows.name} has no labels; prepare it with --label-field, or "
        "leave data.label_field out"
    )


def _describe_other_pairs(training: TrainingConfig, rows: PackedRows) -> str:
    """Return an error about an objective that reads pairs of another kind than rows hold."""
    name = f"training.objective={training.objective}"
    if not training.pairs:
        choices = {PREFERENCE: f"one of {', '.join(OVER_PAIRS)}", UNPAIRED: KTO}[rows.pairs]
        return f"{rows.name} holds {HELD[rows.pairs]}: set --training.objective to {choices}"
    reads, fields = {
        PREFERENCE: ("compares a chosen with a rejected answer", "chosen and rejected"),
        UNPAIRED: ("reads answers that are judged one by one", "prompt, completion and label, or chosen and rejected"),
    }[training.pairs]
    held = f"holds {HELD[rows.pairs]}" if rows.pairs else "holds none"
    return f"{name} {reads}, and {rows.name} {held}: name rows with {fields}, and set --data.content {training.pairs}"


def check_classes(rows: PackedRows, classes: int) -> None:
    """Raise InputError if a label is not one of this number of classes."""
    found = rows.stream.find_label(lambda labels: (labels < 0) | (labels >= classes) | (labels != np.floor(labels)))
    if found is not None:
        where, label = found
        raise InputError(
            f"{where}: the label {label:g} is not one of the classes 0 to {classes - 1}; correct it, or set another "
            "--model.scores"
        )


def _find_common(streams: Iterable[TokenStream], name: str, flags: str) -> StoredLogProbabilities | None:
    """Return what one model says of all documents; None: no model says anything.

    Args:
        name: what the model is, `reference` or `teacher`.
        flags: of `prepare`, which name it.

    Raises:
        InputError: a model says something of some documents, and none or another one of others.
    """
    read = operator.attrgetter(name)
    pieces = [piece for stream in streams for piece in stream.pieces if piece.size]
    by_model = {(found.sha256, found.top_k) if (found := read(piece)) else None: piece for piece in pieces}
    first, *others = by_model.values()
    if others:
        asked, other = sorted([first, others[0]], key=lambda piece: read(piece) is None)
        held = f"those of {read(other).model}" if read(other) else "none"
        raise InputError(
            f"{asked.name} holds log-probabilities by the {name} {read(asked).model}, and {other.name} holds {held}: "
            f"prepare both with the same {flags}"
        )
    common: StoredLogProbabilities | None = read(first)
    return common


def _find_teacher(config: Config, streams: Sequence[TokenStream]) -> StoredLogProbabilities | None:
    """Return what a teacher says of all documents; None: the objective reads nothing of the kind.

    Raises:
        InputError: the objective needs a teacher, and there is none, or it says nothing of some documents.
    """
    if not config.training.distills or config.runs_teacher:
        return None
    found = _find_common(streams, "teacher", "--teacher and --top-k")
    if found is None:
        name = next(piece.name for stream in streams for piece in stream.pieces)
        raise InputError(
            f"training.objective=distill needs a teacher, and {name} holds no log-probabilities of one: prepare it "
            f"with --teacher MODEL (python -m jaxopt_llm.prepare), or name a model with --{TEACHER}"
        )
    return found


def _find_reference(config: Config, streams: Sequence[TokenStream]) -> StoredLogProbabilities | None:
    """Return the reference model whose log-probabilities all documents have; None: none has any.

    Raises:
        InputError: some documents have log-probabilities, and others have none or those of another model; or the
            objective needs them, and there are none; or the rows may hold documents that the model could not read.
    """
    reference = _find_common(streams, "reference", "--reference")
    pieces = [piece for stream in streams for piece in stream.pieces if piece.size]
    needed = config.training.has_reference and (not config.keeps_reference or config.preference.reference == "stored")
    if reference is None and needed:
        raise InputError(_describe_missing_reference(config, pieces[0].name))
    length, limits = config.training.sequence_length, [piece.reference.limit for piece in pieces if piece.reference]
    if limit := min(filter(None, limits), default=0):
        assert reference is not None
        if length > limit:
            raise InputError(
                f"training.sequence_length={length}: the reference {reference.model} has read no longer "
                f"documents than rows of {limit} tokens hold: set at most --training.sequence-length {limit}"
            )
    return reference


def _describe_missing_reference(config: Config, name: str) -> str:
    """Return an error about data without log-probabilities by a reference. name: name of the data."""
    objective = f"training.objective={config.training.objective} compares with a reference model"
    prepare = "prepare the data with --reference MODEL (python -m jaxopt_llm.prepare)"
    if config.keeps_reference:
        return (
            f"preference.reference=stored: {name} holds no log-probabilities of a reference: {prepare}, or set "
            "--preference.reference base"
        )
    if config.lora.rank == 0:
        changed, remedy = "trains all of it", "train adapters with --lora.rank"
    elif config.training.trainable:
        changed, remedy = "also trains whole weights", "set --training.trainable ()"
    else:
        merged = "the model with these adapters (python -m jaxopt_llm.convert merge)"
        changed, remedy = f"begins with lora.pretrained={config.lora.pretrained}", f"set --model.pretrained to {merged}"
    return (
        f"{objective}: {name} holds no log-probabilities of one, and the model cannot be its own, because this run "
        f"{changed}: {prepare}, or {remedy}"
    )


def pack_documents(config: Config, documents: Documents, pulse: Pulse = UNWATCHED) -> Data:
    """Pack the documents of a run into rows.

    pulse: notes the progress.

    Raises:
        InputError: there is no token to predict; or the data do not suit the objective.
    """
    corpus, sets = documents.corpus, documents.sets

    def pack(stream: TokenStream, name: str) -> PackedRows:
        compares = config.training.has_reference and config.preference.reference != "base"
        stream = stream if compares else stream.without("reference")
        stream = stream if config.training.distills and not config.runs_teacher else stream.without("teacher")
        length, limit = config.training.sequence_length, config.data.documents_per_row
        size, long_documents = config.model.vocabulary_size, config.data.long_documents
        rows = PackedRows(stream, length, size, name, long_documents, limit, config.training.reads_scores, pulse)
        _check_objective(config, rows)
        return rows

    training = tuple(pack(source.training, source.name) for source in corpus.sources)
    if corpus.held_out is not None:
        validation = {HELD_OUT: pack(corpus.held_out, "the held-out split")}
    else:
        validation = {each.name: pack(each.documents, f"the validation set {each.name}") for each in sets}
    streams = [rows.stream for rows in (*training, *validation.values())]
    reference, teacher = _find_reference(config, streams), _find_teacher(config, streams)
    return Data(documents.tokenizer, corpus, sets, training, validation, reference, teacher)
