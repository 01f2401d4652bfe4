"""Single rows of tables in PEFT folders, `trainable_token_indices`, in place of the rows of the base model.

No run starts from such a folder, because a run trains whole tables or none.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxopt_llm.checkpoint.huggingface import safetensors, text_part
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, have_equal_values
from jaxopt_llm.checkpoint.huggingface.quantised.codes import Codes, Part
from jaxopt_llm.checkpoint.huggingface.safetensors import StoredTensor
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft.adapter_config import HEAD, PREFIX, PeftConfig, PeftModule
from jaxopt_llm.core.errors import InputError

DELTA = "token_adapter.trainable_tokens_delta"  # PEFT's name: it holds the rows themselves
FIELD = "trainable_token_indices"
_BASE = ".token_adapter.base_layer.weight"  # the table without the rows
_ALONE = ".trainable_tokens_delta"  # in an adapter that is only rows


class TokenRows(NamedTuple):
    """Rows of a table.

    indices: their places, which are token ids. stored: the rows, [indices, width].
    """

    indices: tuple[int, ...]
    stored: StoredTensor


Rows = Mapping[str, TokenRows]  # module -> rows of its table

# --- PEFT's folders


def rename(tensors: dict[str, StoredTensor]) -> None:
    """Rename tensors: tables beside rows as tables without, and rows without adapters as those beside adapters."""
    for name in list(tensors):
        new = name.removesuffix(_BASE) + ".weight" if name.endswith(_BASE) else name
        if name.endswith(_ALONE) and not name.endswith(DELTA):
            new = f"{name.removesuffix(_ALONE)}.{DELTA}"
        if new not in tensors:
            tensors[new] = tensors.pop(name)


def take_rows(
    file: Path,
    tensors: dict[str, StoredTensor],
    peft_config: PeftConfig,
    table: str,
    modules: Mapping[str, PeftModule],
    tied: bool,
) -> dict[str, TokenRows]:
    """Take the rows out of the tensors of a folder.

    Args:
        file: the file of the tensors.
        tensors: the tensors by name; those that are found are removed.
        peft_config: the folder's configuration.
        table: the module of the embedding table.
        modules: the modules of the model that has the tables of the folder.
        tied: whether the base model's head is its table.

    Returns:
        The rows by module. If table and head have the same rows of one table, only those of the table.

    Raises:
        InputError: the configuration names no table of the model, or a tensor does not fit.
    """
    targets = _find_targets(file, peft_config, table, modules)
    if tied and table in targets and targets.get(HEAD) in (None, targets[table]):
        targets.pop(HEAD, None)
        _drop_equal_head(file, tensors, table)
    found = {}
    for module, indices in targets.items():
        name, requires = f"{PREFIX}{module}.{DELTA}", f"{adapter_config.FILE} and the model require"
        if name not in tensors:
            raise InputError(f"{file}: tensor '{name}' is missing; download the folder again")
        rows = TokenRows(indices, tensors.pop(name))
        shape = (len(indices), modules[module].inputs)
        safetensors.check_shape(name, rows.stored, shape, requires, "check that the adapter belongs to the model")
        _check_indices(rows, module, modules[module].outputs)
        found[module] = rows
    return found


def _find_targets(
    file: Path, peft_config: PeftConfig, table: str, modules: Mapping[str, PeftModule]
) -> dict[str, tuple[int, ...]]:
    """Return the indices by module. A list is of the embedding table; the keys of a map are ends of modules' names."""
    given = peft_config.trainable_token_indices or {}
    if not isinstance(given, dict):
        return {table: tuple(given)}
    where, targets = f"{file.parent / adapter_config.FILE}: {FIELD}", dict[str, tuple[int, ...]]()
    for ending, indices in given.items():
        selected = [name for name in modules if name.endswith(ending)]
        tables = [name for name in selected if name == HEAD or modules[name].is_embedding]
        if not tables or tables != selected:
            raise InputError(
                f"{where}: {ending!r} is not an embedding or the head of this decoder; use the model that the adapter "
                "was trained over, or merge the adapter with PEFT (merge_and_unload), and use the merged model"
            )
        if repeated := [name for name in tables if name in targets]:
            raise InputError(f"{where}: {ending!r} and another key both select {repeated[0]}; remove one of them")
        targets |= dict.fromkeys(tables, tuple(indices))
    return targets


def _drop_equal_head(file: Path, tensors: dict[str, StoredTensor], table: str) -> None:
    """Remove the rows of a head that is the table, which PEFT saves with resized tables."""
    rows, head = f"{PREFIX}{table}.{DELTA}", f"{PREFIX}{HEAD}.{DELTA}"
    if head in tensors and rows in tensors and not have_equal_values(tensors[rows], tensors[head]):
        raise InputError(
            f"{file}: the model's head is its embedding table, but {rows!r} and {head!r} differ; download the folder "
            "again"
        )
    tensors.pop(head, None)


def check_is_alone(file: Path, rows: Collection[str], others: Collection[str], what: str) -> None:
    """Raise InputError if a module with single rows is trained in another way, too. what: that way."""
    if both := sorted({*rows} & {*others}):
        raise InputError(
            f"{file.parent / adapter_config.FILE}: {FIELD} and {what} both select {both[0]}, of which PEFT computes "
            "only one; remove one of them"
        )


def _check_indices(rows: TokenRows, module: str, size: int) -> None:
    if rows.indices and (last := max(rows.indices)) >= size:
        raise InputError(
            f"{rows.stored.file}: row {last} of {FIELD}: {module} of the model has only {size} rows; use the base with "
            "the tables that the adapter was trained over, or save the adapter with save_embedding_layers=True"
        )


# --- tables with rows in place of their own


def replace_in(folder: ModelFolder, rows: Rows) -> ModelFolder:
    """Return a model's folder with rows in place of its own.

    Raises:
        InputError: a table has no such row, or a value is not finite in the dtype of the table.
    """
    names = {module: f"{module}.weight" for module in rows}
    names = {module: text_part.rename(name) or name for module, name in names.items()}
    replaced = {name: _replace(folder.stored[name], module, rows[module]) for module, name in names.items()}
    return replace(folder, stored={**folder.stored, **replaced})


def _replace(table: StoredTensor, module: str, rows: TokenRows) -> StoredTensor:
    _check_indices(rows, module, len(table.array))
    indices, dtype = np.asarray(rows.indices, np.int64), table.dtype
    with np.errstate(over="ignore"):  # reported below
        values = rows.stored.read().astype(dtype).astype(np.float32)  # PEFT, too, rounds to the table's dtype
    if not np.isfinite(values).all():
        raise InputError(f"{rows.stored.file}: rows of {module} have values that are not finite in {dtype}")

    def decode(part: Part) -> np.ndarray:
        ids, columns = part
        out = table.read(table.array[_slice(ids), _slice(columns)]).astype(np.float32)
        inside = (indices >= ids.start) & (indices < ids.stop) & ((indices - ids.start) % ids.step == 0)
        out[(indices[inside] - ids.start) // ids.step] = values[inside][:, _slice(columns)]
        return out

    codes = Codes(table.array.shape, (0, 1), dtype, decode)
    return StoredTensor(table.source, codes.array, codes)


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)
