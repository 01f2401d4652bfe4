"""Command `convert`: conversion of run directories to folders of Hugging Face and PEFT.

python -m jaxopt_llm.convert export --checkpoint RUN_DIR [--step N|best] [--base FOLDER] --to FOLDER
python -m jaxopt_llm.convert merge --checkpoint RUN_DIR [--step N|best] [--base FOLDER] --to FOLDER
python -m jaxopt_llm.convert merge --base FOLDER --adapter FOLDER --to FOLDER
"""

import argparse
import sys
from pathlib import Path

from jaxopt_llm.config import cli
from jaxopt_llm.core import errors
from jaxopt_llm.inference import flags

DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    parser = errors.ArgumentParser(
        prog=errors.program_name("convert"),
        description="Convert run directories to Hugging Face folders (config.json and safetensors), and adapters "
        "to PEFT folders.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|merge")
    exporting = commands.add_parser("export", help="write a checkpoint of a run, or its adapters, as a folder")
    exporting.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="training run to read")
    merging = commands.add_parser("merge", help="merge adapters into their model and write it as a folder")
    merging.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="run that trains adapters")
    merging.add_argument(
        "--base", type=Path, metavar="FOLDER", help="model of --adapter, or its hub id; with --checkpoint, see export"
    )
    merging.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="PEFT folder with LoRA adapters of --base, or its hub id"
    )
    flags.add_family_flag(merging)
    flags.add_base_flag(exporting)
    for command in (exporting, merging):
        flags.add_step_flag(command)
        add = command.add_argument
        add("--to", type=Path, required=True, metavar="FOLDER", help="new folder")
        default = "that of the folder from which the run started, or float32; for adapters, their own"
        add("--dtype", choices=DTYPES, help=f"dtype of the tensors (default: {default})")
        add("--shard-bytes", type=int, metavar="N", help="maximum file size (default: 5 GB)")
        text = "do not read the new folder back to compare it with its source"
        add("--no-check", action="store_false", dest="check", help=text)
    return parser


if __name__ == "__main__":
    cli.answer_help(make_parser(), sys.argv[1:])  # the imports below take seconds, because they import JAX

import jax

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors, text_part
from jaxopt_llm.checkpoint.huggingface.model_folder import Origin, collect_leaves, write_layers, write_nothing
from jaxopt_llm.checkpoint.huggingface.quantised import formats
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft.adapter_writer import AdapterOrigin, WholeParameters, write_adapter_folder
from jaxopt_llm.checkpoint.run_weights import StoredLayers, is_run_directory, refuse_option
from jaxopt_llm.config import Config, ModelConfig, fields
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference import base_difference, card, models
from jaxopt_llm.inference.exported import describe_merge, describe_training, list_prompt_notes, list_tokenizer_notes
from jaxopt_llm.inference.flags import Step
from jaxopt_llm.inference.models import use_checkpoint
from jaxopt_llm.inference.proof import Proof, check_folder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.run.initial_weights import find_frozen_base


def export_run(
    directory: Path,
    path: Path,
    dtype: str | None,
    max_file_bytes: int,
    step: Step = None,
    base: Path | None = None,
    check: bool = True,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder.

    For a run that trains adapters, write only the adapters, as a PEFT folder. base: new location of their base. check:
    whether a model is read back and compared (`inference/proof.py`).
    """
    config = _load_config(directory, base, f"{directory} is what export writes; leave it as it is")
    if config.lora.rank:
        _export_adapters(directory, path, config, dtype, step)
    else:
        _export_model(directory, path, config, dtype, max_file_bytes, step, check)


def merge_run(
    directory: Path,
    path: Path,
    dtype: str | None,
    max_file_bytes: int,
    step: Step = None,
    base: Path | None = None,
    check: bool = True,
) -> None:
    """Merge the adapters of a run's checkpoint into its base, and write the model as a Hugging Face folder.

    base: new location of the base; None: that of the run. check: see `export_run`.
    """
    config = _load_config(directory, base, f"name it with --base {directory}, and its adapters with --adapter FOLDER")
    if not config.lora.rank:
        raise InputError(f"--checkpoint {directory}: it has no adapters; write its model with `convert export`")
    _export_model(directory, path, config, dtype, max_file_bytes, step, check)


@errors.own_flags({"model.family": "--family"})
def merge_folders(
    base: Path, adapter: Path, path: Path, dtype: str | None, max_file_bytes: int, check: bool = True, family: str = ""
) -> None:
    """Merge the adapters of a PEFT folder into the model of a Hugging Face folder, and write it as another one.

    check: see `export_run`. family: see `ModelConfig.family`.
    """
    source, adapters = hub.find_folder(base, "--base "), hub.find_folder(adapter, "--adapter ")
    model, layers = models.open_folder_layers(source, adapter, family)
    notes = huggingface.open_rest(source, huggingface.choose_family(model, source), model).describe_mtp()
    text = card.describe_merge(str(base), source, str(adapter), path.resolve().name, notes)
    origin = describe_merge(source, adapters, model.vocabulary_size, lambda folder: card.write(folder, text))
    said = _write_checked(path, layers, model, origin, dtype, max_file_bytes, check)
    print("\n".join([f"{base} with the adapters of {adapter} is in {path}", *said, *notes]))


def _write_checked(
    path: Path,
    layers: StoredLayers,
    model: ModelConfig,
    origin: Origin,
    dtype: str | None,
    max_file_bytes: int,
    check: bool,
) -> list[str]:
    """Write a model folder. Return lines about its comparison with `layers`."""
    proofs: list[Proof] = []

    def compare(folder: Path) -> None:
        rest = huggingface.open_rest(origin.folder, huggingface.choose_family(model, origin.folder), model)
        proofs.append(check_folder(folder, path, layers, model, rest))

    write_layers(path, layers, model, origin, dtype, max_file_bytes, compare if check else write_nothing)
    return [proof.describe() for proof in proofs]


def _load_config(directory: Path, base: Path | None, remedy: str) -> Config:
    """Load the configuration of a run. remedy: what to do if the directory is a Hugging Face model folder."""
    if (directory / adapter_config.FILE).is_file():
        merge = "merge takes it with --base MODEL --adapter FOLDER"
        raise InputError(f"--checkpoint {directory}: this is a PEFT folder of adapters, not a training run; {merge}")
    if models.is_model_folder(directory):
        raise InputError(f"--checkpoint {directory}: this is a Hugging Face model folder, not a training run; {remedy}")
    return models.move_base(directory, models.load_config(directory), base)


def _export_adapters(directory: Path, path: Path, config: Config, dtype: str | None, step: Step) -> None:
    source, model = pretrained.find_source_folder(config), fields.replace_fields(config.model, {"mtp_layers": 0})
    family = huggingface.choose_adapter_family(model, source)
    base = config.model.pretrained
    _, params, _, restored = models.restore_run(directory, config, "float32", "absent", step=step)
    if module := next((path for path in collect_leaves(params) if path.startswith("mtp_")), None):
        raise InputError(
            f"--checkpoint {directory}: it trained {module}, and PEFT has no modules of multi-token prediction; write "
            "the whole model with `convert merge`"
        )
    notes, said = list_prompt_notes(config.data), []
    if config.lora.base != "float":
        try:
            notes.append(base_difference.measure(directory, config, restored).describe(config.lora.base))
        except InputError as error:  # the adapters can be used all the same
            said.append(
                f"the logits over the original weights of the base were not compared with the training's: {error}"
            )
    text = card.describe_run(directory, config, restored, path.resolve().name, notes, "peft")
    files = describe_training(config.data, source, lambda folder: card.write(folder, text)).write_files
    origin = AdapterOrigin("" if is_run_directory(Path(base)) else hub.repository(base), files)
    whole = None
    if config.training.trainable or config.model.resize_vocabulary:
        trained = {name for name, leaf in collect_leaves(params).items() if not leaves.is_wrapped(leaf)}
        layers = models.open_run_layers(directory, config, restored)
        whole = WholeParameters(layers, frozenset(trained), config.model.resize_vocabulary > 0)
    write_adapter_folder(path, params, family, model, config.lora, origin, dtype, whole)
    print(f"the adapters of step {restored} of {directory} are in {path}, in {dtype or 'float32'}")
    for line in (*notes, *said):
        print(line)


def _export_model(
    directory: Path,
    path: Path,
    config: Config,
    dtype: str | None,
    max_file_bytes: int,
    step: Step,
    check: bool,
) -> None:
    find_frozen_base(directory, config)  # first, because without its weights nothing can be written
    source = pretrained.find_source_folder(config)
    if source is None and config.model.pretrained and not is_run_directory(Path(config.model.pretrained)):
        problem = f"{config.model.pretrained}, from which the model came, no longer exists"
        print(f"warning: {problem}: the fields of its config.json are not copied", file=sys.stderr)
    dtype, family = dtype or _read_dtype(source), huggingface.choose_family(config.model, source)
    notes = [*list_tokenizer_notes(config.data, family.model_type), *list_prompt_notes(config.data)]
    notes += huggingface.open_rest(source, family, config.model).describe_mtp()
    if config.lora.rank and config.lora.base != "float":
        notes.append(
            f"The adapters are merged into the base as it was trained over, rounded to {config.lora.base} and "
            "dequantised, not into the original weights."
        )

    def write(checkpoints: Checkpoints, found: int) -> tuple[int, list[str]]:
        layers = models.open_run_layers(directory, config, found)
        origin = models.find_origin(directory, config, found, path.resolve().name, notes)
        return found, _write_checked(path, layers, config.model, origin, dtype, max_file_bytes, check)

    written, said = use_checkpoint(directory, step, write)
    print(f"step {written} of {directory} is in {path}, in {dtype}")
    for line in (*said, *notes):
        print(line)


def _read_dtype(source: Path | None) -> str:
    settings = huggingface.read_settings(source) if source else {}
    if text_part.read_text(settings).get(formats.FIELD):  # weights as codes, often beside float16
        return "bfloat16"
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    return dtype if dtype in DTYPES else "float32"


def main() -> int:
    arguments = make_parser().parse_args(sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")  # copying weights needs no accelerator
    safetensors.check_path_is_free(arguments.to)  # now, because reading the weights takes long
    shard_bytes = safetensors.MAX_FILE_BYTES if arguments.shard_bytes is None else arguments.shard_bytes
    if shard_bytes < 1:
        raise InputError(f"--shard-bytes {shard_bytes}: must be at least 1")
    settings = (arguments.to, arguments.dtype, shard_bytes)
    if arguments.command == "export":
        export_run(arguments.checkpoint, *settings, arguments.step, arguments.base, arguments.check)
    elif arguments.checkpoint and not arguments.adapter:
        refuse_option("--family ", arguments.family, arguments.checkpoint)
        merge_run(arguments.checkpoint, *settings, arguments.step, arguments.base, arguments.check)
    elif arguments.base and arguments.adapter and not arguments.checkpoint:
        refuse_option("--step ", arguments.step, "--base")
        merge_folders(arguments.base, arguments.adapter, *settings, arguments.check, arguments.family)
    else:
        raise InputError("merge requires --checkpoint RUN_DIR, or --base FOLDER and --adapter FOLDER")
    return 0


if __name__ == "__main__":
    errors.run_command(main)
