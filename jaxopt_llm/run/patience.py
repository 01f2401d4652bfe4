"""Early stopping: ends a run whose held-out loss no longer falls."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patience:
    """Held-out losses of a run so far. A checkpoint holds it, so that a resumed run ends at the same step.

    Attributes:
        lowest: the lowest held-out loss; None before the first evaluation.
        step: its step.
        evaluations: number of evaluations since then, none of which was lower.
    """

    lowest: float | None = None
    step: int = 0
    evaluations: int = 0

    def add(self, step: int, loss: float) -> "Patience":
        """Return the record after one more evaluation."""
        if self.lowest is None or loss < self.lowest:
            return Patience(loss, step)
        return dataclasses.replace(self, evaluations=self.evaluations + 1)

    def describe_end(self, limit: int) -> str:
        """Return why the run ends with `evaluation.patience` of `limit`; "" if it goes on."""
        if not 0 < limit <= self.evaluations:
            return ""
        return (
            f"no held-out loss in {self.evaluations} evaluations is lower than that of step {self.step}, "
            f"{self.lowest:.4f} (evaluation.patience={limit})"
        )

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a checkpoint."""
        return {"patience": dataclasses.asdict(self)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Patience":
        return cls(**record.get("patience", {}))
