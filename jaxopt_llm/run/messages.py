"""Messages of a run: the report before its first step, its warnings, and the commands to type after its end."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder
from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.config import Config, ShardingConfig
from jaxopt_llm.config.data import PROMPT
from jaxopt_llm.config.training import DISTILL, NEXT_TOKEN
from jaxopt_llm.config.unread import describe_unread
from jaxopt_llm.core import errors, hub, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.template import has_template
from jaxopt_llm.execution import stage_layout
from jaxopt_llm.model import flops, param
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.parallel.codes import BLOCK_SIZES
from jaxopt_llm.parallel.gathering import find_exact_matrices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import find_undivided
from jaxopt_llm.run.setup import Setup
from jaxopt_llm.step import moments


def print_report(setup: Setup, say: Callable[[str], None]) -> None:
    """Print the report with `say`, and warnings to stderr."""
    for line in describe_run(setup):
        say(line)
    if setup.processes.first:
        for line in list_warnings(setup):
            print(f"warning: {line}", file=sys.stderr)
    say("compiling the step ...")  # silent for seconds on a CPU, and for minutes with a large model


def describe_run(setup: Setup) -> Iterator[str]:
    """Yield the lines of the report in order."""
    config, program, placement, data = setup.config, setup.program, setup.placement, setup.data
    specs, frozen = program.model.specs, jax.tree.leaves(program.specs.frozen)
    active = flops.count_active_parameters(config.model, specs)
    parameters = flops.describe_parameters(leaves.count_parameters(specs), active)
    trained = f", of which {param.count_parameters(program.specs.masters):,} are trained," if frozen else ""
    yield (
        f"{parameters}{trained} on {placement.mesh.size} {jax.devices()[0].device_kind} "
        f"device(s){setup.processes}, run directory {setup.directory}"
    )
    if program.attention.reason:
        yield f"attention: {program.attention}"
    if experts := exchange.describe_exchange(config.model.moe, placement):
        yield f"experts' tokens: {experts}"
    tokenizer = data.tokenizer
    ends = f"BOS {' '.join(map(str, tokenizer.prefix))}" if tokenizer.prefix else "no BOS"
    yield f"tokenizer: {config.data.tokenizer}, {tokenizer.vocabulary_size:,} tokens, {ends}, EOS {tokenizer.eos}"
    if tokenizer.note:
        yield f"tokenizer: {tokenizer.note}"
    yield f"data: {data.corpus.name}: {data.corpus}"
    yield from data.corpus.skipped.describe_notes()
    yield from _describe_mixture(setup)
    for each in data.sets:
        yield "; ".join([f"validation set {each.name}: {each}", *each.skipped.describe_notes()])
    if setup.prompts is not None:
        yield str(setup.prompts)
    yield from (rows.summary for rows in (*data.training, *data.validation.values()) if rows.summary)
    if data.reference:
        yield f"reference: log-probabilities by {data.reference.model} in the corpus"
    elif data.teacher:
        yield f"teacher: {data.teacher.top_k} log-probabilities of each token by {data.teacher.model} in the corpus"
    elif config.runs_reference:
        yield "reference: the model without its adapters, in a forward of each step"
    if 1 < config.mesh.pipeline <= config.training.accumulation:
        yield f"pipeline: {_describe_idle_share(setup)}"
    yield from _list_unused_settings(setup)


def _describe_mixture(setup: Setup) -> Iterator[str]:
    """Yield the share and the epochs of each source, if data.weights sets the shares."""
    config, sources = setup.config, setup.data.corpus.sources
    if not config.data.weights:
        return
    total = sum(source.weight for source in sources)
    rows_read = config.training.steps * config.training.batch_size
    for source, rows in zip(sources, setup.data.training, strict=True):
        share = source.weight / total
        epochs = rows_read * share / len(rows)
        yield f"source {source.name}: {share:.1%} of the rows, {epochs:,.2f} epochs in {config.training.steps:,} steps"


def list_warnings(setup: Setup) -> Iterator[str]:
    """Yield a line for each setting that is allowed but has no effect or is probably a mistake."""
    config = setup.config
    yield from describe_unread(config)
    for skipped in (setup.data.corpus.skipped, *(each.skipped for each in setup.data.sets)):
        if endless := skipped.describe_endless(config.data):
            yield endless
    if setup.program.attention.warning:
        yield setup.program.attention.warning
    tokenizer, vocabulary = setup.data.tokenizer.vocabulary_size, config.model.vocabulary_size
    if tokenizer < vocabulary / 2:
        yield (
            f"the tokenizer {config.data.tokenizer} has {tokenizer:,} tokens, but the model has "
            f"{vocabulary:,}; is this the tokenizer that --data.tokenizer should name?"
        )
    for rows in setup.data.training:
        if rows.stream.size <= rows.sequence_length:
            yield (
                f"{rows.name} has {rows.stream.size:,} tokens, and a row has --training.sequence-length "
                f"{rows.sequence_length:,}: the rest of the row is padding"
            )
    for each in setup.data.sets:
        if repeated := sorted(each.files & setup.data.corpus.files):
            yield f"the validation set {each.name} reads {repeated[0]}, which data.paths trains on"
    if config.lora.pretrained and config.model.pretrained:
        folder = hub.find_folder(config.lora.pretrained, "lora.pretrained=")
        if other := adapter_config.describe_other_base(folder, config.model.pretrained):
            yield other
    if config.lora.rank and not config.model.pretrained:
        yield "the adapters train over random parameters; name a model with --model.pretrained"
    if config.mesh.pipeline > config.training.accumulation:
        yield f"fewer microbatches than stages: {_describe_idle_share(setup)}"
    warmup = config.schedule.count_warmup(config.training.steps)
    if warmup >= config.training.steps and warmup > 1:
        yield (
            f"{config.schedule.describe_warmup(config.training.steps)} reaches the end of the run, step "
            f"{config.training.steps}: the learning rate only rises; set a smaller --schedule.warmup-steps"
        )
    if left := config.training.steps % config.training.local_steps:
        yield (
            f"the last {left} of {config.training.steps} steps are in no outer step, and so not in the weights "
            "that are evaluated and exported: make --training.steps a multiple of "
            f"training.local_steps={config.training.local_steps}"
        )


def _describe_idle_share(setup: Setup) -> str:
    config = setup.config
    layout, microbatches = setup.program.model.layout, config.training.accumulation
    return stage_layout.describe_waste(layout, config.mesh.pipeline, microbatches, config.pipeline)


def describe_exact_matrices(specs: tree.Tree, placement: Placement) -> Iterator[str]:
    """Yield a line if matrices move exactly in spite of the settings of codes, which it names."""
    default = ShardingConfig()
    settings = ("int8_gathers", "data_gradients", "fsdp_gradients")
    given = [f"sharding.{name}" for name in settings if getattr(placement.sharding, name) != getattr(default, name)]
    if exact := find_exact_matrices(specs, placement):
        yield (
            f"{', '.join(given)}: {len(exact)} matrices move exactly (first: {exact[0]}): "
            f"no block of {BLOCK_SIZES[-1]} to {BLOCK_SIZES[0]} values divides each device's part of the last dimension"
            ", or the devices divide none of their dimensions"
        )


def _list_unused_settings(setup: Setup) -> Iterator[str]:
    """Yield a line for each setting that has no effect on some of the parameters or steps."""
    config, program = setup.config, setup.program
    sharded = program.model.specs if config.sharding.zero_stage == 3 else program.specs.masters
    for path in find_undivided(sharded, setup.placement):
        yield f"ZeRO does not shard {path}: none of its dimensions is divisible"
    uncompressed = moments.find_uncompressed(program.specs.masters) if config.optimizer.state_dtype == "int8" else []
    if uncompressed:
        yield (
            f"optimizer.state_dtype: {len(uncompressed)} matrices have moments in 32 bits (first: {uncompressed[0]}): "
            f"no block of {moments.BLOCK_SIZES[-1]} to {moments.BLOCK_SIZES[0]} values divides their last dimension"
        )
    yield from describe_exact_matrices(program.specs.masters, setup.placement)
    end = config.schedule.end_step
    if end is not None and end < config.training.steps:
        yield f"the learning rate has its final value from step {end} on: see --schedule.decay-steps"
    warmup = config.schedule.count_warmup(config.training.steps)
    if end is not None and end > config.training.steps > warmup:
        yield f"the run ends before its schedule, which has {end} steps: see --schedule.decay-steps"


def list_next_commands(config: Config) -> Iterator[str]:
    """Yield lines with the commands that read the last checkpoint of a run, or the best one if another is better."""
    run = f"--checkpoint {shlex.quote(config.run.directory)}"
    best = _find_better_step(Path(config.run.directory))
    if best is not None:
        run += " --step best"
        yield f"next, with the checkpoint of step {best}, whose held-out loss is the lowest:"
    else:
        yield "next:"
    has_documents = config.evaluation.every or config.evaluation.paths
    if config.training.objective in (NEXT_TOKEN, DISTILL) or config.model.scores:  # the others have no loss per token
        reads_texts = has_documents and not config.draws
        yield f"  {errors.program_name('evaluate')} {run}" + ("" if reads_texts else " --data.paths FILE")
    data = config.data
    is_chat = data.content not in ("text", PROMPT) and (data.names_template or has_template(data))
    question = "--chat" if is_chat else "--prompt TEXT"
    if not config.model.scores:
        yield f"  {errors.program_name('generate')} {run} {question}"
    if not _has_family(config):
        return
    convert, folder = errors.program_name("convert"), config.run.directory.rstrip("/")
    if config.lora.rank:
        yield f"  {convert} merge {run} --to {shlex.quote(f'{folder}-merged')}"
    yield f"  {convert} export {run} --to {shlex.quote(f'{folder}-exported')}"


def _find_better_step(directory: Path) -> int | None:
    """Return the step with the lowest held-out loss; None if it is the last one, or if no step was evaluated."""
    paths = step_directories.find_checkpoints(directory / "checkpoints")
    ranked = step_directories.rank_by_loss(step_directories.read_losses(paths))
    return ranked[0] if ranked and ranked[0] != max(paths) else None


def _has_family(config: Config) -> bool:
    """Return whether `convert` can write the model: Hugging Face has a class for it."""
    try:
        model_folder.choose_family(config.model, pretrained.find_source_folder(config))
    except InputError:
        return False
    return True
