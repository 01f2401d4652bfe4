"""How fast a run is: what is counted and timed between two records."""

import time
from typing import Any

import jax


class Meter:
    """Makes the records of a run.

    tokens_per_step: of the whole batch.
    utilisation: for each name under which a record has a share of the devices' peak (see model/flops.py), the share
        that one token per second would be.
    """

    def __init__(self, tokens_per_step: int, utilisation: dict[str, float]) -> None:
        self._tokens, self._utilisation = tokens_per_step, utilisation
        self.restart(0)

    def restart(self, step: int) -> None:
        """Times what follows this step; what went before it, as an evaluation or a save, is left out."""
        self._from, self._clock, self._waited = step, time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        """Adds time in which the run had no batch to go on with."""
        self._waited += seconds

    def record(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """The record of a step that has just ended, and a restart."""
        seconds = (time.perf_counter() - self._clock) / (step - self._from)
        per_second = self._tokens / seconds
        record = {
            "step": step,
            **values,
            "tokens": step * self._tokens,
            "tokens_per_second": per_second,
            "step_seconds": seconds,
            "data_seconds": self._waited / (step - self._from),
            **{name: share * per_second for name, share in self._utilisation.items()},
        }
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None:
            record["peak_bytes"] = peak
        self.restart(step)
        return record
