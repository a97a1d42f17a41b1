"""The rank of a process of the learner follows from the variables of what started it."""

from __future__ import annotations

import pytest

from nouscoder.errors import Unusable
from nouscoder.learner.parallel.process_rank import ProcessRank, process_rank

GROUP = {"WORLD_SIZE": "4", "MASTER_ADDR": "learner-0.learner"}
LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}


@pytest.mark.parametrize(
    ("environment", "process"),
    [
        pytest.param({}, None, id="alone"),
        pytest.param({"HOSTNAME": "learner-0"}, None, id="a StatefulSet of one"),
        pytest.param({"JOB_COMPLETION_INDEX": "2"}, None, id="a Job whose pods do not train together"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, None, id="torchrun with one rank"),
        pytest.param({**LWS, "LWS_GROUP_SIZE": "1"}, None, id="a LeaderWorkerSet of one"),
        pytest.param(
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"},
            ProcessRank(3, 4, 1, "node0", 1234),
            id="torchrun",
        ),
        pytest.param(
            {**LWS, "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "node0"},
            ProcessRank(9, 16, 1, "node0", 29500),
            id="torchrun in a LeaderWorkerSet",
        ),
        pytest.param(LWS, ProcessRank(3, 4, 0, "lws-0.lws.default", 29500), id="a LeaderWorkerSet"),
        pytest.param(
            {**GROUP, "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-workers-0-2-x7k"},
            ProcessRank(2, 4, 0, "learner-0.learner", 29500),
            id="a JobSet",
        ),
        pytest.param(
            {**GROUP, "HOSTNAME": "learner-1"}, ProcessRank(1, 4, 0, "learner-0.learner", 29500), id="StatefulSet"
        ),
        pytest.param(
            {**GROUP, "POD_NAME": "my-learner-12-3", "HOSTNAME": "gpu-node-7"},
            ProcessRank(3, 4, 0, "learner-0.learner", 29500),
            id="a StatefulSet that names its pod",
        ),
    ],
)
def test_the_rank_follows_from_the_environment(environment: dict[str, str], process: ProcessRank | None) -> None:
    assert process_rank(environment) == process


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
        ({**LWS, "LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS is not set"),
        ({**GROUP, "HOSTNAME": "laptop"}, "nothing names the rank: start the learner with torchrun"),
        ({**GROUP, "RANK": "4"}, "rank 4, but WORLD_SIZE is 4"),
        ({**LWS, "LWS_WORKER_INDEX": "7"}, "rank 7, but LWS_GROUP_SIZE is 4"),
        ({**GROUP, "RANK": "one"}, "RANK is 'one'"),
        ({**GROUP, "WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is '0'"),
        ({**GROUP, "RANK": "1", "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_an_environment_that_names_no_place_is_one_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(Unusable, match=sentence):
        process_rank(environment)
