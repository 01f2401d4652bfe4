"""Links that a collective uses."""

import pytest
from jax.sharding import AbstractMesh

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.config import AXES
from jaxopt_llm.planning import links


def test_links() -> None:
    mesh = AbstractMesh((1, 2, 4, 1, 1, 2), AXES)  # 16 GPUs: data 2, fsdp 4, tensor 2
    chip = CHIPS["h100"]

    def link(*axes: str, kind: str = "all-gather", gpus_per_host: int = 8) -> tuple[str, float]:
        return links.find_link(axes, kind, mesh, chip, gpus_per_host)

    assert link("fsdp", "tensor") == ("nvlink", chip.peer_bytes_per_second)
    assert link("data") == ("network", chip.network_bytes_per_second)
    assert link("data", "fsdp") == ("network", 4 * chip.network_bytes_per_second)
    assert link("fsdp", gpus_per_host=4) == ("network", 2 * chip.network_bytes_per_second)
    assert link("data", "fsdp", "tensor", kind="collective-permute") == ("network", chip.network_bytes_per_second)


@pytest.mark.parametrize("name", ["4090", "l40s", "h100-pcie"])
def test_gpus_without_nvlink_use_pcie(name: str) -> None:
    mesh, chip = AbstractMesh((1, 1, 8, 1, 1, 1), AXES), CHIPS[name]
    assert links.find_link(("fsdp",), "all-gather", mesh, chip, 8) == ("pcie", chip.peer_bytes_per_second)
    assert links.find_link(("fsdp",), "all-gather", mesh, chip, 4)[0] == "network"
