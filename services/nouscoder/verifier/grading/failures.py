"""Infrastructure failures during grading: counted and logged here. Their only verdict is internal_error."""

from __future__ import annotations

import logging

from nouscoder.verifier.observe.metrics import FailureCause, VerifierMetrics
from nouscoder.verifier.sandbox.base import SandboxError

log = logging.getLogger(__name__)


def count_failure(metrics: VerifierMetrics, cause: FailureCause, message: str) -> str:
    """Count and log a failure. Returns `message`."""
    metrics.failed(cause)
    log.warning("internal error", extra={"cause": cause.value, "detail": message[:500]})
    return message


def count_error(metrics: VerifierMetrics, error: Exception) -> str:
    """Count and log an exception raised while grading. Returns the verdict's message."""
    match error:
        case TimeoutError():
            return count_failure(metrics, FailureCause.SANDBOX_SILENT, "the sandbox did not answer in time")
        case SandboxError():
            return count_failure(metrics, FailureCause.SANDBOX, str(error))
    log.error("grading failed", exc_info=error)
    return count_failure(metrics, FailureCause.GRADER, f"{type(error).__name__} in the grader")
