"""run_job: a user's script as one process of a job."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxopt_llm.config import Config, DistributedConfig
from jaxopt_llm.core import errors, stop_signals
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import launchers, process_group, runtime


def run_job(main: Callable[[], object], distributed: DistributedConfig | Mapping[str, Any] | None = None) -> NoReturn:
    """Run the main function of a script as one process of a job, and exit.

    torchrun, srun, mpirun or Kubernetes starts the script once on each host, and sets the variables from which the
    processes find each other. A single process runs `main` alone. An error of this package, of a disk or of a network
    is one line on standard error, and the exit code is that of `jaxopt-llm train`: 2 for wrong input, 3 for a loss that
    diverged, 4 for checkpoints, 5 if another process was lost or is missing, 74 for a disk or a network, 75 after a
    signal. An error of one process ends all. Only process 0 writes to standard output.

    SIGTERM, SIGINT and SIGHUP stop the script. `fit` saves first; elsewhere they end the process at once. If the script
    has set its own handler for one of them before, that handler stays, except during `fit`. The handlers of `run_job`
    stay until the process has ended.

    Args:
        main: function without arguments. No device of JAX may be open before it runs, so arrays are made in it.
        distributed: the job, as `Config.distributed`; by default it is read from the launcher's variables.

    Raises:
        SystemExit: always, with the exit code.
    """
    errors.run_command(lambda: _run(main, distributed))


def _run(main: Callable[[], object], distributed: DistributedConfig | Mapping[str, Any] | None) -> int:
    if threading.current_thread() is not threading.main_thread():
        raise InputError("run_job: it is called in a thread; call it in the main thread, which receives the signals")
    stop_signals.end_at_signals()
    stop_signals.listen()
    given = dict(distributed) if isinstance(distributed, Mapping) else distributed
    config = Config(distributed=given or DistributedConfig()).distributed  # type: ignore[arg-type]
    if found := config.problems():
        raise InputError("; ".join(found))
    job = launchers.find_job(config, os.environ)
    if job.processes > 1:
        runtime.check_no_device("the script before run_job")
    runtime.prepare_devices()
    with process_group.join_job(job, config, {}):
        main()
    return 0
