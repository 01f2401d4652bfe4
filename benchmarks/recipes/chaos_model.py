"""A tiny model for benchmarks/chaos.py. It does harm to itself when it receives SIGUSR1.

The file `harm.<rank>` beside the run directory names the harm. The signal's handler runs in the main thread, between
two steps or while it waits for one.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import jax

from jaxopt_llm.config import (
    Config,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    if "CHAOS_FOLDER" in os.environ:
        signal.signal(signal.SIGUSR1, _harm)
    return Config(
        model=ModelConfig(width=16, layers=2, pattern=("global",), heads=2, kv_heads=1, head_dim=8, mlp_width=16),
        training=TrainingConfig(batch_size=8, sequence_length=32),
        schedule=ScheduleConfig(warmup_steps=10),
        evaluation=EvaluationConfig(every=50, batches=2),
        logging=LoggingConfig(every=1, tensorboard=False),
    )


def _harm(signum: int, frame: FrameType | None) -> None:
    harm = (Path(os.environ["CHAOS_FOLDER"]) / f"harm.{os.environ['RANK']}").read_text()
    if harm == "stuck":
        time.sleep(1e9)
    elif harm == "exception":
        if _is_saving(frame):  # there it would be a failed save, after which a run goes on
            threading.Timer(0.1, os.kill, (os.getpid(), signum)).start()
            return
        raise RuntimeError("an error that nobody foresaw")
    elif harm == "flip":
        _flip_a_bit()
    elif harm == "clock":
        now = time.time
        time.time = lambda: now() + 3600.0
    elif harm == "slow disk":
        _slow_down_disk(seconds=5.0)
    else:
        sys.exit(f"unknown harm {harm}")


def _is_saving(frame: FrameType | None) -> bool:
    while frame and not frame.f_code.co_filename.endswith("checkpoint/native/checkpoints.py"):
        frame = frame.f_back
    return frame is not None


def _slow_down_disk(seconds: float) -> None:
    """Let each sync of a file take a second more, for some time."""
    sync, end = os.fsync, time.monotonic() + seconds

    def sync_slowly(file: int) -> None:
        time.sleep(1.0 if time.monotonic() < end else 0.0)
        sync(file)

    os.fsync = sync_slowly  # type: ignore[assignment]


def _flip_a_bit() -> None:
    """Flip a bit of the largest array of float32 that rests on this process's first device."""
    arrays = [array for array in jax.live_arrays() if array.dtype == "float32" and array.ndim > 1]
    shard = max(arrays, key=lambda array: array.size).addressable_shards[0].data
    byte = ctypes.cast(shard.unsafe_buffer_pointer() + 4 * 5 + 1, ctypes.POINTER(ctypes.c_uint8))
    byte[0] ^= 1 << 5
