"""Text model of a folder that holds more: a vision tower, or layers of multi-token prediction (MTP).

The config.json of a folder with a vision tower has the fields of the text model in `text_config`, and its tensors have
a prefix. MTP layers follow the last layer. The tensors of other parts and of MTP layers are not read; a folder that is
written from it keeps them as they are.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.codecs import Settings
from jaxopt_llm.checkpoint.huggingface.family import MTP_COUNTS, Family
from jaxopt_llm.checkpoint.huggingface.quantised import formats, methods
from jaxopt_llm.checkpoint.huggingface.safetensors import StoredTensor, TensorSpec
from jaxopt_llm.core.errors import InputError

TEXT = "text_config"
# Start of the name of a tensor -> that of the text model alone. Versions of transformers write one or the other form.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
ALONE = "model."  # start of the names of modules of a text model
MODULES = "model.language_model."  # start of the names of its modules in the classes of transformers
PLAIN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")  # of a text model without a prefix
OUTSIDE = ("tie_word_embeddings", formats.FIELD)  # fields of the text model beside `text_config`
# model_type of published folders without `text_config`, where the fields of the text model lie beside those of the
# vision tower -> that of the text model.
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", *(f"*{suffix}" for suffix in safetensors.PICKLE_SUFFIXES))


def is_part(settings: Settings) -> bool:
    """Return whether the model of a config.json has more parts than the text model."""
    return isinstance(settings.get(TEXT), dict) or str(settings.get("model_type")) in FLAT


def read_text(settings: Settings) -> Settings:
    """Return the fields of the text model of a config.json."""
    if not is_part(settings):
        return settings
    if not isinstance(text := settings.get(TEXT), dict):
        return settings | {"model_type": FLAT[settings["model_type"]], "architectures": None}
    return text | {name: settings[name] for name in OUTSIDE if settings.get(name) is not None}


def write_text(settings: Settings, written: Settings) -> Settings:
    """Return a config.json with the written fields of the text model, in the place that the source has for them.

    settings: those of the source; {} without one.
    """
    if not is_part(settings):
        return written
    name_of_class = ("architectures", "model_type")
    changed = {name: value for name, value in written.items() if name not in name_of_class}
    is_flat = not isinstance(settings.get(TEXT), dict)
    text = settings if is_flat else settings[TEXT]
    given = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if sections := {name: value for name, value in given.items() if name.startswith("mrope")}:
        # How RoPE divides a head between the positions of images, which the model of text does not have.
        changed["rope_scaling"] = (changed.get("rope_scaling") or {"rope_type": "default"}) | sections
    outside = {name: changed[name] for name in (*OUTSIDE, "torch_dtype") if name in changed}
    # What is written has another form of the RoPE parameters.
    kept, text = (
        {name: value for name, value in each.items() if name not in ("dtype", "rope_parameters", formats.FIELD)}
        for each in (settings, text)
    )
    return kept | (changed if is_flat else outside | {TEXT: text | changed})


def rename(name: str) -> str | None:
    """Return the name that a tensor has in the text model alone; None for a tensor of another part."""
    for prefix, alone in PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name if name.startswith(PLAIN) else None


def name_modules(family: Family, settings: Settings) -> Family:
    """Return the family with the names that its modules have in the whole model, as in adapters of PEFT.

    settings: config.json of the base model.
    """
    return spell_modules(family, MODULES) if is_part(settings) else family


def spell_modules(family: Family, prefix: str) -> Family:
    """Return the family with this start of the names of its modules."""

    def spell(names: str) -> str:
        return " ".join(spell_name(name, prefix) for name in names.split(" "))

    names = {spell(name): leaves for name, leaves in family.names.items()}
    in_memory = {spell(name): spell(published) for name, published in family.in_memory_names.items()}
    return replace(family, names=names, in_memory_names=in_memory)


def spell_name(name: str, prefix: str) -> str:
    """Return the name of a tensor or a module with another start, such as `model.language_model.`."""
    alone = rename(name) or name
    return prefix + alone.removeprefix(ALONE) if alone.startswith(ALONE) else alone


def find_spelling(names: Iterable[str], default: str = ALONE) -> str:
    """Return the start of the names of modules: that of the whole model, of an older version of it, or of text alone.

    default: for names that have none of them.
    """
    given, starts = list(names), [each for each, alone in PREFIXES.items() if alone == ALONE]
    return next((each for each in (*starts, ALONE) if any(name.startswith(each) for name in given)), default)


def select_text(stored: Mapping[str, StoredTensor], settings: Settings) -> dict[str, StoredTensor]:
    """Return the tensors of the text model, by the names that they have there.

    Raises InputError if the folder has more parts, and none of its names is that of a text model.
    """
    if not is_part(settings):
        return dict(stored)
    selected = {alone: tensor for name, tensor in stored.items() if (alone := rename(name)) is not None}
    if stored and not any(name.startswith(ALONE) for name in selected):
        name, tensor = next(iter(stored.items()))
        problem = f"the names of its tensors, such as {name!r}, are not those of a text model"
        remedy = (
            f"which begin with one of {', '.join((*PREFIXES, *PLAIN))}; use a model of the table in docs/pretrained.md"
        )
        raise InputError(f"{tensor.file.parent}: {problem}, {remedy}")
    return selected


class Rest:
    """Tensors and files of a source folder that a written folder keeps.

    Attributes:
        is_part: whether the folder holds more than a text model.
        tensors: those that are not read, by name. names: name in the text model alone -> name in the folder.
        shapes: shapes of the tensors of the text model, by name in the text model alone.
        mtp: names of those of MTP layers. settings: the fields of config.json that count these.
    """

    def __init__(self, folder: Path | None, settings: Settings, family: Family, written: Collection[str] = ()) -> None:
        """Open the folder. settings: its config.json. Without one, or if it is the text model alone, there is no rest.

        written: names of the tensors of the text model that are written anew, also those of MTP layers.

        Raises InputError if the folder has a rest, and its weights are not there.
        """
        text = read_text(settings)
        self.is_part = folder is not None and is_part(settings)
        counts = {name: text[name] for name in MTP_COUNTS if family.mtp_prefix and text.get(name)}
        has_weights = folder is not None and any(
            (folder / name).is_file() for name in (safetensors.SINGLE, safetensors.INDEX)
        )
        has_rest = folder is not None and bool(self.is_part or counts or (family.mtp_prefix and has_weights))
        self.folder = folder if has_rest else None
        stored = methods.join_codes(safetensors.open_folder(self.folder), text) if self.folder else {}
        own = {name: rename(name) if self.is_part else name for name in stored}  # folder -> text model alone
        mtp = family.find_mtp({alone for alone in own.values() if alone is not None}, text) - {*written}
        self.mtp = [name for name, alone in own.items() if alone in mtp]
        self.settings = counts if self.mtp else {}
        self.names = {alone: name for name, alone in own.items() if alone is not None}
        self.shapes = {alone: stored[name].array.shape for alone, name in self.names.items()}
        self.tensors = {name: each for name, each in stored.items() if own[name] is None or own[name] in mtp}
        self._table = self.names.get("model.embed_tokens.weight", "")

    def name(self, alone: str) -> str:
        """Return the name that a tensor of the text model gets."""
        if alone in self.names or not self.is_part:
            return self.names.get(alone, alone)
        # A tensor that the source does not have, such as a head that it ties: with the prefix of the embedding table.
        prefix = next((prefix for prefix in PREFIXES if self._table.startswith(prefix)), "")
        if alone.startswith("lm_head."):
            return f"language_model.{alone}" if prefix == "language_model.model." else alone
        return prefix + alone.removeprefix("model.") if prefix else alone

    def add(
        self, specs: Mapping[str, TensorSpec], get_tensor: Callable[[str], np.ndarray]
    ) -> tuple[dict[str, TensorSpec], Callable[[str], np.ndarray]]:
        """Return specs and a getter of the whole folder's tensors, from those of the text model alone."""
        of_text = {self.name(alone): alone for alone in specs}

        def get(name: str) -> np.ndarray:
            kept = self.tensors.get(name)
            return get_tensor(of_text[name]) if kept is None else kept.read().astype(kept.dtype)

        kept = {name: TensorSpec(each.dtype, each.array.shape) for name, each in self.tensors.items()}
        return {name: specs[alone] for name, alone in of_text.items()} | kept, get

    def describe_mtp(self) -> list[str]:
        """Return a sentence about MTP layers; empty without them."""
        if not self.mtp:
            return []
        return [
            f"The {len(self.mtp)} tensors of multi-token prediction ({self.mtp[0]}, ...) are those of the base: they "
            "were not trained."
        ]

    def find_changed(self, written: Mapping[str, StoredTensor]) -> str | None:
        """Return the name of a kept tensor that differs in a written folder; None: all are equal."""
        for name, kept in self.tensors.items():
            found = written.get(name)
            if found is None or not np.array_equal(found.read(), kept.read().astype(kept.dtype)):
                return name
        return None

    def copy_files(self, target: Path) -> None:
        """Copy the files beside the weights that the target does not have, such as those of a processor."""
        for file in sorted(self.folder.iterdir()) if self.folder and self.is_part else ():
            is_weight = any(file.match(pattern) for pattern in WEIGHTS)
            if file.is_file() and not is_weight and file.suffix != ".py" and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
