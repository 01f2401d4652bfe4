"""Eight simulated CPU devices, GPU programs compiled without a GPU, and the GPU of the tests marked `gpu`."""

import os
from collections.abc import Iterator
from importlib.metadata import version

# Read when JAX loads its CUDA plugin; without it the plugin wants a driver.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Compiling is most of what a test on the CPU costs. By the environment, for the commands that tests start, too.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if version("jaxlib") < "0.11":  # which has the older, quicker code generator no more, and aborts on its name
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
# Tests side by side share the GPU, of which JAX would give the first process three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

from jaxopt_llm.kernels import attention_auto
from jaxopt_llm.parallel.mesh import simulate_cpu_devices

simulate_cpu_devices(8)
# Where there is a GPU, too: what runs on it says so, by the fixture below.
jax.config.update("jax_default_device", jax.devices("cpu")[0])


@pytest.fixture(autouse=True, scope="session")
def nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `training.attention auto` chooses from, whatever the package's table has by now."""
    table = tmp_path_factory.mktemp("measured") / "table.json"
    table.write_text("[]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_auto, "TABLE", table)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-tests-on-cpu", action="store_true", help="try the tests marked gpu on the CPU, which proves no GPU right"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.gpu_tests_on_cpu or gpus():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU is visible to JAX"))


def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """The first GPU, made the default device. What is compiled for it is optimised: XLA knows no other GPU code.

    To try the tests, a simulated device that is not the other tests' default one.
    """
    device = jax.devices("cpu")[-1] if request.config.option.gpu_tests_on_cpu else gpus()[0]
    jax.config.update("jax_disable_most_optimizations", False)
    with jax.default_device(device):
        yield device
    jax.config.update("jax_disable_most_optimizations", True)
