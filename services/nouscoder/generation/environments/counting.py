"""A process that counts the tokens of prompts before a run starts.

It loads the tokenizer's library, and keeps it from loading torch, which a tokenizer does not need.

stdin has {"folder", "environment", "texts": [PromptText, ...]}, and stdout gets {"counts"} or {"fault"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nouscoder.config import EnvironmentSection
from nouscoder.domain.prompt import PromptText
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The counts in the order of the texts, or what makes them impossible."""
    settings = EnvironmentSection.model_validate(request["environment"])
    try:
        prompts = Prompts(load_tokenizer(Path(request["folder"])), settings)
        return {"counts": prompts.count([_text(*text) for text in request["texts"]])}
    except (TokenizerError, EnvironmentUnusable) as error:
        return {"fault": str(error)}


def _text(prompt: str, template: str, starter_code: str, languages: list[str]) -> PromptText:
    return PromptText(prompt, template, starter_code, tuple(languages))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    json.dump(answer(json.load(sys.stdin)), out)
