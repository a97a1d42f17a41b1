"""The bound of staleness that each policy gives: docs/design/staleness.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import ConfigError, load_config
from nouscoder.domain.staleness import StalenessBound, StalePolicy

_K, _S = st.integers(1, 12), st.integers(0, 12)
_RATIO_TO_THE_SAMPLER = ('learner.objective={name = "ppo", proximal = "sampler"}', "learner.correction.kind=none")


@given(k=_K, staleness=_S)
def test_drop_admits_k_batches_and_drops_what_is_older_than_either_limit(k: int, staleness: int) -> None:
    bound = StalenessBound.of(StalePolicy.DROP, k, staleness)
    assert (bound.pipeline_k, bound.waits_for_older) == (k, True)
    assert bound.max_age == (staleness if staleness < k - 1 else k - 1)


@given(k=_K, staleness=_S)
def test_keep_admits_k_batches_and_only_max_staleness_limits_the_age(k: int, staleness: int) -> None:
    assert StalenessBound.of(StalePolicy.KEEP, k, staleness) == StalenessBound(k, staleness, waits_for_older=False)


@given(k=_K, staleness=_S)
def test_finish_first_admits_so_few_that_waiting_alone_keeps_the_bound(k: int, staleness: int) -> None:
    """With waiting the age is at most the k of admission - 1, so no group reaches an age at which it is dropped."""
    bound = StalenessBound.of(StalePolicy.FINISH_FIRST, k, staleness)
    assert bound.waits_for_older
    assert 1 <= bound.pipeline_k <= k
    assert bound.max_age == bound.pipeline_k - 1 <= staleness
    assert bound.pipeline_k == k or bound.max_age == staleness, "no less is admitted than the limits allow"


def test_keep_without_importance_weights_is_refused() -> None:
    load_config(None, ["broker.stale_policy=keep"])
    with pytest.raises(ConfigError, match=r"stale_policy keep needs importance weights: choose a learner\.correction"):
        load_config(None, ["broker.stale_policy=keep", "learner.correction.kind=none"])


def test_replay_without_importance_weights_or_with_more_batches_than_are_kept_is_refused() -> None:
    load_config(None, ["learner.replay_batches=4"])
    with pytest.raises(ConfigError, match="replay_batches needs importance weights"):
        load_config(None, ["learner.replay_batches=1", "learner.correction.kind=none"])
    with pytest.raises(ConfigError, match="replay_batches 20 is more than keep_batches 16"):
        load_config(None, ["learner.replay_batches=20"])


@pytest.mark.parametrize("setting", ["broker.stale_policy=keep", "learner.replay_batches=1"])
def test_a_ratio_to_the_sampler_is_an_importance_weight(setting: str) -> None:
    config = load_config(None, [setting, *_RATIO_TO_THE_SAMPLER])
    assert config.learner.corrects_other_policies
