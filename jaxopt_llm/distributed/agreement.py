"""Comparison of what the processes of a job will run: the settings of JAX, the lowered step and its hyperparameters."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import jax

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.distributed.rendezvous import describe_differences

# Settings of JAX that change no program, and may differ between hosts: caches, dumps, logs, tracebacks, addresses and
# the names of devices.
_PER_HOST = re.compile(
    r"cache|dump|log|traceback|frames|source_url|color|address|visible_devices|default_device|hlo_source"
)


def check_same_programs(processes: Processes, lower: Callable[[], Any], hyperparameters: Any) -> None:
    """Raise InputError if the settings of JAX, the lowered step or its hyperparameters differ between the processes.

    lower: returns the lowered step. With a single process it is not called.
    """
    if processes.count == 1:
        return
    facts = {name: str(value) for name, value in jax.config.values.items() if not _PER_HOST.search(name)}
    text = lower().as_text()  # without the locations in source files, which contain paths of this host
    facts["hash of the lowered step"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    facts["hyperparameters"] = str(hyperparameters)
    answers = processes.channel("programs").exchange(json.dumps(facts))
    first, *others = map(json_files.parse, answers)
    for index, each in enumerate(others, 1):
        if found := describe_differences(index, each, first):
            raise InputError(f"{found}; start all processes in the same environment")
