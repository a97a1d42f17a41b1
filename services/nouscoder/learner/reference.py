"""The reference policy of an objective: the initial policy, or a teacher."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from nouscoder.config import LearnerSection
from nouscoder.errors import Unusable
from nouscoder.learner.weights import load_model
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer


def reference_policy(policy: Path, settings: LearnerSection) -> PreTrainedModel:
    """The initial policy, or the teacher. Raises Unusable when the teacher has other tokens than the policy."""
    if not settings.teacher:
        return load_model(policy)
    teacher = Path(settings.teacher)
    try:
        own, others = (load_tokenizer(folder).vocabulary() for folder in (policy, teacher))
    except TokenizerError as error:
        raise Unusable(str(error)) from error
    if own != others:
        odd = min(token for token, _ in own.items() ^ others.items())
        raise Unusable(f"the teacher {teacher} has other tokens than the policy, for example {odd!r}")
    return load_model(teacher)
