"""Directories that are created after Orbax has begun to save into them."""

import asyncio
from pathlib import Path

from orbax.checkpoint._src.serialization.types import ParamInfo

from jaxopt_llm.checkpoint.native.checkpoints import DeferredDirectory


def make_info(directory: DeferredDirectory) -> ParamInfo:
    return ParamInfo(name="w", parent_dir=directory, value_typestr="jax.Array")  # type: ignore[arg-type]


def test_orbax_waits_for_the_directory(tmp_path: Path) -> None:
    directory = DeferredDirectory(tmp_path / "step").subdirectory("masters")
    info = make_info(directory)

    async def save() -> None:
        waiting = asyncio.ensure_future(info.await_path_creation())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        directory.set_created()
        await waiting

    asyncio.run(save())
    assert (str(info.parent_dir), str(info.path)) == (f"{tmp_path}/step/masters", f"{tmp_path}/step/masters/w")


def test_a_thread_may_meet_what_another_one_has_half_replaced(tmp_path: Path) -> None:
    """Orbax replaces the directory of an array first, and its path after that."""
    directory = DeferredDirectory(tmp_path / "masters")
    directory.set_created()
    info = make_info(directory)
    info.parent_dir = asyncio.run(directory.await_creation())  # by the other thread, which was interrupted here
    assert str(info.path) == f"{tmp_path}/masters/w"
    # This thread has seen before that it has to wait.
    assert asyncio.run(info.parent_dir.await_creation()) == info.parent_dir  # type: ignore[attr-defined]
