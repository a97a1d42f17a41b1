"""How a policy was asked in its training: nouscoder_prompt.json in its folder.

Runs and fine-tunings write it with every policy. Training, fine-tuning, evaluation and `serve generation` take from it
what their configuration does not set, so that a policy is asked in its own words. The file is one JSON object with the
keys of PromptSettings; those of earlier releases have no date.

INVARIANT: a file that is damaged or hostile is refused in one sentence. At most MOST_BYTES of it are read, and a text
that it makes has the problem once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path

from pydantic import ValidationError

from nouscoder.config import Config, EnvironmentSection
from nouscoder.domain.prompt import PROMPT, PromptSettings
from nouscoder.errors import Unusable
from nouscoder.formats.body import first_fault
from nouscoder.policy_folder.inspection import chat_template_text, has_chat_template

PROMPT_FILE = "nouscoder_prompt.json"
MOST_BYTES = 64 * 1024
_KEYS = tuple(field.name for field in fields(PromptSettings))


class PromptFileUnusable(Unusable):
    """The file says nothing that can be used. The message names it."""


def recorded_prompt(folder: Path) -> PromptSettings | None:
    """What the policy's folder says; None when it says nothing. Raises PromptFileUnusable."""
    file = folder / PROMPT_FILE
    if not file.is_file():
        return None
    try:
        with file.open("rb") as data:
            text = data.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES // 1024} KiB")
        record = json.loads(text)
        if not isinstance(record, dict) or {"date", *record} != {*_KEYS}:
            raise ValueError(f"it must have the keys {', '.join(_KEYS)} and no others")
        found = EnvironmentSection.model_validate(record)
        json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        if found.prompt_template.count(PROMPT) != 1:
            raise ValueError(f"prompt_template must have {PROMPT} once")
    except ValidationError as error:
        raise _unusable(file, ": ".join(first_fault(error))) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(file, str(error)) from None
    return found.record(PromptSettings)


def _unusable(file: Path, why: str) -> PromptFileUnusable:
    return PromptFileUnusable(f"{file} is no description of a policy's prompt: {why}; remove it, or write it again")


def with_recorded_prompt(config: Config, folder: Path) -> Config:
    """`config` with what the policy in `folder` says of its prompt, for unset keys. Raises PromptFileUnusable."""
    environment, recorded = config.generation.environment, recorded_prompt(folder)
    if recorded is None:
        return config
    unset = {name: value for name, value in asdict(recorded).items() if name not in environment.model_fields_set}
    return config.changed(generation={"environment": environment.model_copy(update=unset)})


def dateless(config: Config, folder: Path) -> bool:
    """Whether the chat template of the policy in `folder` writes the present day, and `config` does not say which."""
    environment = config.generation.environment
    asked = environment.prompt_as != "text" and not environment.date
    return asked and "strftime_now" in chat_template_text(folder)


def with_date(config: Config, folder: Path, begun: Path | None = None) -> Config:
    """`config` with a date for a policy that needs one and has none: that recorded in the folder `begun`, or today."""
    if not dateless(config, folder):
        return config
    before = recorded_prompt(begun) if begun else None
    day = before.date if before else date.today().isoformat()
    return config.changed(generation={"environment": config.generation.environment.model_copy(update={"date": day})})


def prompt_of(environment: EnvironmentSection, folder: Path) -> PromptSettings:
    """How the environment asks the policy in `folder`."""
    return environment.record(PromptSettings).resolved(has_chat_template(folder))


def trained_prompt(config: Config) -> PromptSettings:
    """How the policy of a training is asked."""
    return prompt_of(config.generation.environment, config.in_run_folder(config.policy.path))


def prompt_json(settings: PromptSettings) -> str:
    """The contents of the file."""
    return json.dumps(asdict(settings), indent=1, ensure_ascii=False) + "\n"


def prompt_lines(environment: EnvironmentSection, folder: Path) -> Iterator[str]:
    """What is to be said of the prompt: how it is written, and where it is not the one of the policy's training.

    Nothing is said of a policy without a chat template that was not trained here. Raises PromptFileUnusable.
    """
    now, before = prompt_of(environment, folder), recorded_prompt(folder)
    if before is None:
        if has_chat_template(folder):
            yield f"prompts: {now.described}"
        return
    others = [name for name in _KEYS if getattr(now, name) != getattr(before, name)]
    if others:
        yield (
            f"prompts: {now.described}; the policy was trained with {before.described}"
            f" ({', '.join(others)} {'is' if len(others) == 1 else 'are'} not as in {PROMPT_FILE})"
        )
    else:
        yield f"prompts: {now.described}, as in the policy's training"
