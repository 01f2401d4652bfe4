"""Settings of the watchdog, which ends a job that makes no progress."""

from dataclasses import dataclass

from jaxopt_llm.config.metadata import NON_NEGATIVE, POSITIVE, find_out_of_range, setting


@dataclass(frozen=True)
class WatchdogConfig:
    factor: float = setting(10.0, bounds=NON_NEGATIVE)
    """End the job with exit code 5 if a process makes no progress for this multiple of the median of its phase, and at
    least for the floor of the phase. 0 = off."""
    floor_seconds: float = setting(600.0, bounds=POSITIVE)
    """Smallest limit, in seconds, of a step, an evaluation and a wait for data. A save that takes longer is slow: the
    run says so and goes on."""
    compile_floor_seconds: float = setting(3600.0, bounds=POSITIVE)
    """Smallest limit, in seconds, of the preparation of a run, which opens its data, of a compile, of a restore, and of
    the first step and the first evaluation, which may compile."""
    save_floor_seconds: float = setting(3600.0, bounds=POSITIVE)
    """Smallest limit, in seconds, of a save, which is written in the background."""
    single_process: bool = False
    """Also watch a job of one process, whose devices can wait for each other too."""

    def problems(self) -> list[str]:
        return find_out_of_range("watchdog", self)
