"""Choice of the family of a model, by its config.json or by its ModelConfig.

A family fits a ModelConfig if the config.json that it writes reads back as the same model.
"""

from typing import Any

from jaxopt_llm.checkpoint.huggingface import codecs, dense_families, expert_families
from jaxopt_llm.checkpoint.huggingface.codecs import Settings, Unsupported
from jaxopt_llm.checkpoint.huggingface.family import Family, describe_nearest
from jaxopt_llm.checkpoint.huggingface.quantised import methods
from jaxopt_llm.config import ModelConfig

FAMILIES = (*dense_families.FAMILIES, *expert_families.FAMILIES)  # in the order in which an export tries them


def find_by_settings(settings: Settings, name: str = "") -> Family:
    """Return the family of a config.json. Raise Unsupported if there is none, or if the file asks for other code.

    name: model_type of the family that it is read as, if its own is not known; empty: its own.
    """
    model_type, architectures = settings.get("model_type"), settings.get("architectures")
    if model_type == "mistral" and settings.get("layer_types") is not None:  # as transformers reads it
        model_type, architectures = "ministral", None
    known: dict[Any, Family] = {each: family for family in FAMILIES for each in family.model_types}
    model_type = model_type if isinstance(model_type, str) else None
    if name and name not in known:
        raise Unsupported(f"model.family={name}: no such family; choose one of {', '.join(sorted(known))}")
    if name and known.get(model_type, known[name]) is not known[name]:
        raise Unsupported(
            f"model.family={name}: its model_type is {model_type!r}, which is read; leave model.family out"
        )
    family = known.get(name or model_type)
    if family is None:
        problem = f"no family of this name is read; {describe_nearest(settings, FAMILIES)}"
        raise codecs.unsupported(f"model_type={settings.get('model_type')!r}", problem)
    first = architectures[0] if isinstance(architectures, list) and architectures else architectures or None
    classes = [each for each in (family.architecture, family.classifier) if each]
    if not name and first not in (None, *classes):  # the class of an unknown model_type has another name
        problem = f"only {' or '.join(classes)} is read; the model would need another head, or layers of another kind"
        raise codecs.unsupported(f"architectures={architectures}", problem)
    codecs.check_value(settings, "is_causal", True)
    each = settings.get("per_layer_config")
    if each and not family.reads_layer_settings:
        raise codecs.unsupported(
            f"per_layer_config={codecs.shorten(each)}", "the model would need settings that differ between its layers"
        )
    methods.check_method(settings)
    return family


def find_by_model(config: ModelConfig, source: Settings | None = None) -> Family:
    """Return the first family that fits a model.

    Args:
        config: the model.
        source: config.json of the folder that the model came from. The family that it was read as is tried first.

    Raises:
        Unsupported: no family fits; the message names the nearest family and the fields that it lacks.
    """
    preferred = config.family or (source or {}).get("model_type")
    ordered = sorted(FAMILIES, key=lambda family: preferred not in family.model_types)
    differences = {family: family.find_differences(config) for family in ordered}
    fitting = next((family for family in ordered if not differences[family]), None)
    if fitting is None:
        nearest = min(ordered, key=lambda family: _measure(differences[family]))
        raise Unsupported(
            f"no Hugging Face family fits the model; the nearest, {nearest.model_type}, does not support "
            f"{', '.join(differences[nearest])}"
        )
    return fitting


def _measure(differences: list[str]) -> tuple[bool, int]:
    """Return how far a family is. One that cannot write a config.json at all is the farthest."""
    return not all(each.startswith("model.") for each in differences), len(differences)
