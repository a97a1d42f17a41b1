"""Which rank this process is.

It follows from the environment variables of what started it:

| started by | rank | number of ranks | address of rank 0 |
|---|---|---|---|
| torchrun | RANK | WORLD_SIZE | MASTER_ADDR |
| a LeaderWorkerSet | LWS_WORKER_INDEX | LWS_GROUP_SIZE | LWS_LEADER_ADDRESS |
| a JobSet or an indexed Job | JOB_COMPLETION_INDEX | WORLD_SIZE | MASTER_ADDR |
| a StatefulSet | the number at the end of POD_NAME, else of HOSTNAME | WORLD_SIZE | MASTER_ADDR |

The first row whose variable for the rank is set counts. Kubernetes does not tell a pod of the last two kinds how many
pods there are nor where the first one is, so their template sets WORLD_SIZE and MASTER_ADDR. The port is MASTER_PORT,
or torchrun's 29500. A pod with several devices runs torchrun, whose variables come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nouscoder.errors import Unusable

_PORT = "29500"

_ORDINAL = re.compile(r".*-(\d+)")


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """One process among `size`: its rank, its device on this machine, and where rank 0 listens."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def process_rank(environment: Mapping[str, str]) -> ProcessRank | None:
    """The rank that the variables name; None for a process alone. Raises Unusable naming a missing or bad variable."""
    in_set = "RANK" not in environment and "LWS_WORKER_INDEX" in environment  # of a LeaderWorkerSet
    sizes, leaders = ("LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS") if in_set else ("WORLD_SIZE", "MASTER_ADDR")
    if sizes not in environment or (size := _number(environment, sizes)) == 1:
        return None
    rank = _rank(environment)
    if not rank < size:
        raise Unusable(f"this process is rank {rank}, but {sizes} is {size}: ranks begin with 0")
    defaults = {"MASTER_PORT": _PORT, "LOCAL_RANK": "0"}
    port, local_rank = (_number({**defaults, **environment}, variable) for variable in defaults)
    if not environment.get(leaders):
        raise Unusable(f"{leaders} is not set: it names the machine of rank 0, which the other ranks connect to")
    return ProcessRank(rank, size, local_rank, environment[leaders], port)


def _rank(environment: Mapping[str, str]) -> int:
    for variable in ("RANK", "LWS_WORKER_INDEX", "JOB_COMPLETION_INDEX"):
        if variable in environment:
            return _number(environment, variable)
    name = environment.get("POD_NAME") or environment.get("HOSTNAME", "")
    if ordinal := _ORDINAL.fullmatch(name):
        return int(ordinal[1])
    raise Unusable(
        "WORLD_SIZE is set, but nothing names the rank: start the learner with torchrun, or in a StatefulSet, a"
        " LeaderWorkerSet or a JobSet"
    )


def _number(environment: Mapping[str, str], variable: str) -> int:
    try:
        value = int(environment[variable])
    except ValueError:
        value = -1
    if value < 0 or (variable in ("WORLD_SIZE", "LWS_GROUP_SIZE") and not value):
        raise Unusable(f"{variable} is {environment[variable][:100]!r}, which is not a number that a group can have")
    return value
