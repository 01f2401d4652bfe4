"""Settings of groups that are jobs of their own, and meet at an outer server."""

from dataclasses import dataclass

from jaxopt_llm.config.addresses import find_problem
from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, find_out_of_range, setting


@dataclass(frozen=True)
class GroupsConfig:
    server: tuple[str, ...] = setting((), resume="freely")
    """Addresses host:port of the outer servers (jaxopt_llm.outer_server). This run is then one of several groups, each
    a job of its own, whose masters an outer step averages after every training.local_steps steps. With several servers,
    process p of the group uses server p modulo their number. Empty = no other groups."""
    index: int = setting(0, bounds=NON_NEGATIVE)
    """Number of this group, from 0. Group i reads the i-th training.batch_size rows of each global batch."""
    count: int = setting(1, bounds=AT_LEAST_ONE)
    """Number of groups. The global batch has training.batch_size rows for each."""
    delay: int = setting(0, bounds=NON_NEGATIVE)
    """Steps between the end of a round and the step after which its update is applied. Meanwhile the group trains, and
    the changes travel. Must be below training.local_steps. 0 = wait for the update."""
    token_file: str = setting("", resume="freely")
    """File with a secret that the groups and the outer servers share. Empty = the environment variable
    JAXOPT_LLM_GROUPS_TOKEN, or no secret if it is not set."""

    @property
    def share(self) -> tuple[int, int]:
        """Index of this group, and number of groups: 0 and 1 without an outer server."""
        return (self.index, self.count) if self.server else (0, 1)

    def problems(self) -> list[str]:
        found = find_out_of_range("groups", self)
        found += [f"groups.server: {each}: {why}" for each in self.server if (why := find_problem(each))]
        if self.index >= self.count:
            found.append(
                f"groups.index={self.index} must be below groups.count={self.count}: groups are numbered from 0"
            )
        return found
