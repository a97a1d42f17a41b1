"""What tests of several folders share: the runner pods of a cluster, for those that are marked `cluster`."""

from __future__ import annotations

import os

import pytest

from nouscoder.verifier.sandbox import PoolConfig


@pytest.fixture(scope="session")
def runner_pool() -> PoolConfig:
    """Pods that a gateway on this machine makes. `make test-cluster` names the template and the key."""
    template, key_file = (os.environ.get(f"NOUSCODER_POOL_{name}", "") for name in ("TEMPLATE", "KEY_FILE"))
    if not template or not key_file:
        pytest.skip("NOUSCODER_POOL_TEMPLATE and NOUSCODER_POOL_KEY_FILE name no runner pod: run make test-cluster")
    return PoolConfig(template=template, key_file=key_file, spares=0, start_s=120)
