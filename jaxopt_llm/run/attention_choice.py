"""Choice of a run's attention before its data is packed: cuDNN limits the documents in a row.

Process 0 chooses, and sends the choice to the others. A run that continues on the same devices keeps its choice. A
kernel is checked before it is chosen (kernels/attention_check.py).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.packing import measure_waste
from jaxopt_llm.data.tokens.corpus import Source
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.kernels.attention import find_unsupported, get_compute_capability
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionCall, AttentionChoice
from jaxopt_llm.kernels.attention_check import check_attention
from jaxopt_llm.kernels.attention_cudnn import DOCUMENTS_PER_ROW
from jaxopt_llm.model.self_attention import describe_call, most_frequent_kind
from jaxopt_llm.run.directory import Started, find_changes

CUDNN = "cudnn"
LIMITS = (1, 2, 4, 8, DOCUMENTS_PER_ROW)  # of the documents in a row, from which the start of a run takes one
MOST_WASTE = 0.02  # share of the tokens: cuDNN saves a larger share of a step
# Share of the tokens that a smaller limit than DOCUMENTS_PER_ROW may add to the padding. The memory that cuDNN's
# backward works in is proportional to the limit: on an H200, 0.27 GB for each document of a row of 8192 tokens with 32
# heads of size 128. A limit of 8 instead of 16 makes attention 3 to 13% faster.
MORE_WASTE = 0.001


@dataclasses.dataclass(frozen=True)
class Limit:
    """Maximum number of documents in a row for cuDNN, and the share of the tokens that it turns into padding.

    waste: None if it is unknown.
    """

    documents: int
    waste: float | None

    def __str__(self) -> str:
        return f"at most {self.documents} documents in a row"


def resolve_attention(
    config: Config, device: Any, sources: Sequence[Source], processes: Processes, started: Started | None
) -> tuple[Config, AttentionChoice]:
    """Return the configuration with `training.attention` and `data.documents_per_row` resolved, and the choice.

    Args:
        device: the first device of the mesh.
        sources: the training documents.
        started: the run that continues; None for a new one.

    Raises:
        InputError: the requested implementation does not support the device, the model or the data, or gives wrong
            results on this GPU.
    """
    message = ""
    if processes.first:
        choice, documents = _Chooser(config, device, sources, started).choose()
        message = json.dumps([dataclasses.asdict(choice), documents])
    values, documents = json_files.parse(processes.channel("training.attention").exchange(message)[0])
    choice = AttentionChoice(**values)
    resolved = fields.replace_fields(config, {"training.attention": choice.name, "data.documents_per_row": documents})
    return resolved, choice


def choose_working(
    device: Any,
    requested: str,
    call: AttentionCall,
    group: int,
    excluded: Mapping[str, str] = MappingProxyType({}),
    kept: str = "",
) -> AttentionChoice:
    """Choose an implementation as `choose_attention` does, of those that are right on this GPU. CPUs need no check.

    Args:
        device: a device of this process.
        group: query heads of a key-value head.
        kept: the choice of the run that continues, which is taken instead of `auto` if it is right; "" for none.

    Raises:
        InputError: the requested implementation does not support the device or the call, or is wrong on this GPU.
    """
    excluded, failures = dict(excluded), list[str]()
    while True:
        choice = choose_attention(device, kept or requested, call, excluded)
        needs_check = choice.name != FALLBACK and device.platform == "gpu"
        failure = check_attention(choice.name, call, group) if needs_check else ""
        if not failure:
            return dataclasses.replace(choice, warning="; ".join(failures))
        if requested != AUTO:
            raise InputError(f"training.attention={choice.name} {failure}; set --training.attention {AUTO}")
        failures.append(f"attention {choice.name} {failure}, so that the run uses another implementation")
        excluded[choice.name], kept = failure, ""


class _Chooser:
    """Choice of one process."""

    def __init__(self, config: Config, device: Any, sources: Sequence[Source], started: Started | None) -> None:
        self._config, self._device, self._sources, self._started = config, device, sources, started
        self._changes = find_changes(started, config, device) if started else ""
        self._limit = config.data.documents_per_row or (started.config.data.documents_per_row if started else 0)
        # The rows of a run never change, so that a run without a limit stays without one.
        self._can_limit = not self._limit and not started
        self._call = self._describe_call(DOCUMENTS_PER_ROW if self._can_limit else self._limit or None)

    def choose(self) -> tuple[AttentionChoice, int]:
        """Return the choice, and the maximum number of documents in a row; 0 for no limit."""
        requested, kept = self._config.training.attention, self._find_kept()
        chooses = not kept and requested in (AUTO, CUDNN) and self._can_limit
        limit = self._find_limit() if chooses else None
        call = self._describe_call(limit.documents) if limit else self._call
        excluded = self._exclude_cudnn(limit) if limit and requested == AUTO else {}
        model = self._config.model.of_layers(most_frequent_kind(self._config.model))
        choice = choose_working(self._device, requested, call, model.heads // model.kv_heads, excluded, kept)
        limited = limit if choice.name == CUDNN else None
        reason = self._describe(choice, limited, anew=requested == AUTO and choice.name != kept)
        documents = limited.documents if limited else self._limit
        return dataclasses.replace(choice, reason=reason), documents

    def _describe_call(self, documents: int | None) -> AttentionCall:
        config = self._config
        parts = config.mesh.context if config.sharding.has_ring else 1
        dtype, length = config.precision.compute_dtype, config.training.sequence_length
        return describe_call(config.model, dtype, length, documents, parts)

    def _find_kept(self) -> str:
        """Return the implementation that a continued run keeps, or "" if there is a new choice."""
        started = self._started
        if started is None or self._config.training.attention != AUTO or self._changes:
            return ""
        name, capability = started.config.training.attention, get_compute_capability(self._device)
        return "" if name == AUTO or find_unsupported(self._call, capability)[name] else name

    def _find_limit(self) -> Limit:
        """Return the smallest limit that turns hardly more tokens into padding than the largest one.

        The waste is unknown if cuDNN does not support the call, or if the documents have no index. Then finding them
        means reading all tokens, which is left to who sets cuDNN or a limit.
        """
        if self._is_unsupported() or any(each.training.documents is None for each in self._sources):
            return Limit(DOCUMENTS_PER_ROW, None)
        wastes = {limit: self._measure_waste(limit) for limit in LIMITS}
        documents = next(each for each in LIMITS if wastes[each] <= wastes[DOCUMENTS_PER_ROW] + MORE_WASTE)
        return Limit(documents, wastes[documents])

    def _is_unsupported(self) -> bool:
        return bool(find_unsupported(self._call, get_compute_capability(self._device))[CUDNN])

    def _measure_waste(self, limit: int) -> float:
        """Return the share of the tokens of the mixture that a limit turns into padding."""
        training, long_documents = self._config.training, self._config.data.long_documents
        if training.reads_scores and long_documents == AUTO:
            long_documents = "cut"  # rows hold whole documents
        length = training.sequence_length
        wastes = (
            source.weight * measure_waste(source.training, length, long_documents, limit) for source in self._sources
        )
        return sum(wastes) / sum(source.weight for source in self._sources)

    def _exclude_cudnn(self, limit: Limit) -> dict[str, str]:
        """Return why cuDNN's limit of documents cannot be set, in the form of `choose_attention`."""
        if self._is_unsupported() or (limit.waste is not None and limit.waste <= MOST_WASTE):
            return {}
        problem = "finding the documents of this data takes reading all of its tokens"
        if limit.waste is not None:
            problem = f"{limit} would turn {limit.waste:.1%} of the tokens into padding"
        return {CUDNN: f"{problem}; to accept that, set --data.documents-per-row {limit.documents}"}

    def _describe(self, choice: AttentionChoice, limit: Limit | None, anew: bool) -> str:
        reasons = [choice.reason] if choice.reason else []
        if limit and limit.waste is not None:
            reasons.append(f"{limit} turn {limit.waste:.1%} of the tokens into padding")
        if anew and self._changes:
            reasons.append(f"chosen anew because {self._changes}")
        return "; ".join(reasons)
