"""Choice of a run's attention before its data is packed: cuDNN limits the documents in a row.

Process 0 chooses, and sends the choice to the others. A run that continues on the same devices keeps its choice.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.config import Config, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.corpus import Source
from jaxopt_llm.data.packing import measure_waste
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.kernels.attention import find_unsupported, get_compute_capability
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionCall, AttentionChoice
from jaxopt_llm.kernels.attention_cudnn import DOCUMENTS_PER_ROW
from jaxopt_llm.model.self_attention import describe_call
from jaxopt_llm.training.kernel_check import check_attention

AUTO, CUDNN = "auto", "cudnn"
MOST_WASTE = 0.02  # share of the tokens: cuDNN saves a larger share of a step


@dataclasses.dataclass(frozen=True)
class Started:
    """Settings and device of the run that its directory holds."""

    config: Config
    device: str


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
    values, documents = json.loads(processes.channel("training.attention").exchange(message)[0])
    choice = AttentionChoice(**values)
    resolved = fields.replace_fields(config, {"training.attention": choice.name, "data.documents_per_row": documents})
    return resolved, choice


class _Chooser:
    """Choice of one process."""

    def __init__(self, config: Config, device: Any, sources: Sequence[Source], started: Started | None) -> None:
        self._config, self._device, self._sources, self._started = config, device, sources, started
        self._limit = config.data.documents_per_row or (started.config.data.documents_per_row if started else 0)
        # The rows of a run never change, so that a run without a limit stays without one.
        self._can_limit = not self._limit and not started
        documents = DOCUMENTS_PER_ROW if self._can_limit else self._limit or None
        self._call = self._describe_call(documents)

    def choose(self) -> tuple[AttentionChoice, int]:
        """Return the choice, and the maximum number of documents in a row; 0 for no limit."""
        requested, kept, failures = self._config.training.attention, self._find_kept(), list[str]()
        waste = self._measure_waste() if not kept and requested in (AUTO, CUDNN) else None
        excluded = self._exclude_cudnn(waste) if requested == AUTO and not kept else {}
        while True:
            choice = choose_attention(self._device, kept or requested, self._call, excluded)
            failure = self._check(choice.name)
            if not failure:
                reason = self._describe(choice, waste, anew=requested == AUTO and not kept)
                return AttentionChoice(choice.name, reason, "; ".join(failures)), self._limit_documents(choice.name)
            if requested != AUTO:
                raise InputError(f"training.attention={choice.name} {failure}; set --training.attention {AUTO}")
            failures.append(f"attention {choice.name} {failure}, so that the run uses another implementation")
            excluded[choice.name], kept = failure, ""

    def _describe_call(self, documents: int | None) -> AttentionCall:
        config = self._config
        parts = config.mesh.context if config.sharding.context_exchange == "ring" else 1
        dtype, length = config.precision.compute_dtype, config.training.sequence_length
        return describe_call(config.model, dtype, length, documents, parts)

    def _find_kept(self) -> str:
        """Return the implementation that a continued run keeps, or "" if there is a new choice."""
        started = self._started
        if started is None or self._config.training.attention != AUTO or self._find_changes():
            return ""
        name, capability = started.config.training.attention, get_compute_capability(self._device)
        return "" if name == AUTO or find_unsupported(self._call, capability)[name] else name

    def _find_changes(self) -> str:
        """Return what changed since the start of a continued run, of all that decides the choice."""
        started = self._started
        if started is None:
            return ""
        if started.device != self._device.device_kind:
            return f"the device was {started.device or 'unknown'} and is {self._device.device_kind}"
        return "the mesh changed" if started.config.mesh != self._config.mesh else ""

    def _measure_waste(self) -> float | None:
        """Return the share of the tokens that cuDNN's limit turns into padding.

        None: cuDNN does not support the call, there is no limit to set, or the documents have no index. Then finding
        them means reading all tokens, which is left to who sets cuDNN or a limit.
        """
        unsupported = find_unsupported(self._call, get_compute_capability(self._device))[CUDNN]
        if unsupported or not self._can_limit or any(each.training.documents is None for each in self._sources):
            return None
        length, long_documents = self._config.training.sequence_length, self._config.data.long_documents
        wastes = [
            source.weight * measure_waste(source.training, length, long_documents, DOCUMENTS_PER_ROW)
            for source in self._sources
        ]
        return sum(wastes) / sum(source.weight for source in self._sources)

    def _exclude_cudnn(self, waste: float | None) -> dict[str, str]:
        """Return why cuDNN's limit of documents cannot be set, in the form of `choose_attention`."""
        if not self._can_limit or (waste is not None and waste <= MOST_WASTE):
            return {}
        problem = "finding the documents of this data takes reading all of its tokens"
        if waste is not None:
            problem = (
                f"at most {DOCUMENTS_PER_ROW} documents in a row would turn {waste:.1%} of the tokens into padding"
            )
        return {CUDNN: f"{problem}; to accept that, set --data.documents-per-row {DOCUMENTS_PER_ROW}"}

    def _check(self, name: str) -> str:
        """Return how an implementation failed on this GPU; "" if it did not, or needs no GPU."""
        if name == FALLBACK or self._device.platform != "gpu":
            return ""
        model = self._config.model
        return check_attention(name, self._call, model.heads // model.kv_heads)

    def _limit_documents(self, name: str) -> int:
        return DOCUMENTS_PER_ROW if name == CUDNN and self._can_limit else self._limit

    def _describe(self, choice: AttentionChoice, waste: float | None, anew: bool) -> str:
        reasons = [choice.reason] if choice.reason else []
        if choice.name == CUDNN and waste is not None:
            reasons.append(
                f"at most {DOCUMENTS_PER_ROW} documents in a row turn {waste:.1%} of the tokens into padding"
            )
        if anew and (changes := self._find_changes()):
            reasons.append(f"chosen anew because {changes}")
        return "; ".join(reasons)
