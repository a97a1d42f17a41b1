"""The reference policy of an objective: the initial policy, or a teacher. It must have the policy's tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import PreTrainedModel

from nouscoder.config import LearnerSection
from nouscoder.errors import Unusable
from nouscoder.learner.model.weights import load_model
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer


def reference_policy(policy: Path, settings: LearnerSection) -> PreTrainedModel:
    """The initial policy, or the teacher. Raises Unusable when the teacher has other tokens than the policy."""
    if not settings.teacher:
        return load_model(policy)
    teacher = Path(settings.teacher)
    check_same_tokens(policy, teacher, "teacher")
    return load_model(teacher)


def check_same_tokens(policy: Path, other: Path, role: str) -> PolicyTokenizer:
    """The tokenizer of the folder `other`. Raises Unusable, naming its `role`, if the policy has other tokens."""
    try:
        own, others = load_tokenizer(policy), load_tokenizer(other)
    except TokenizerError as error:
        raise Unusable(str(error)) from error
    differing = own.vocabulary().items() ^ others.vocabulary().items()
    if differing:
        odd = min(token for token, _ in differing)
        raise Unusable(f"the {role} {other} has other tokens than the policy, for example {odd!r}")
    return others


def say_stdin() -> None:
    """Check each folder of a JSON request on stdin, {"policy", "others": {role: folder}}. Prints {} or {"fault"}."""
    request, answer = json.load(sys.stdin), {}
    try:
        for role, folder in request["others"].items():
            check_same_tokens(Path(request["policy"]), Path(folder), role)
    except Unusable as error:
        answer = {"fault": str(error)}
    sys.stdout.write(json.dumps(answer))
