"""How many tokens the prompts of a run have, and which are too long for its context.

Prompts are counted before a run starts (run/preflight.py), as generation will write them: with the template and the
chat template. The counts are kept beside the index of the problems, in prompts-KEY.json. KEY is a digest of the
tokenizer's files and of the settings that a prompt depends on.

A prompt is too long when it leaves no room for one token of an answer in generation.max_tokens_total; for evaluations,
in evaluation.max_tokens_total where that is given.

A text that is so short that it fits with any tokenizer is not counted.

INVARIANT: a count belongs to the text of a problem, not to its name, so a changed problem file costs only the texts
that are new. Without a count a problem is never left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, EntryPointSection, EnvironmentSection
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.input_file import json_object
from nouscoder.policy_folder.identity import TOKENIZER_FILES
from nouscoder.policy_folder.inspection import chat_template_text

_DIGEST_BYTES = 8


def digest_of(text: PromptText) -> str:
    """Names the text."""
    return blake2b(json.dumps([*text]).encode(), digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """The counts of tokens by digest of the text."""

    file: Path
    tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, index: Path) -> PromptLengths:
        """Those that are known for a configuration; none when nothing was counted. `index` is the index's folder."""
        file = index / f"prompts-{_key(config)}.json"
        return cls(file, json_object(file))

    def missing(self, texts: Iterable[PromptText]) -> list[PromptText]:
        """The texts that are not counted."""
        return [text for text in dict.fromkeys(texts) if digest_of(text) not in self.tokens]

    def plus(self, counts: Mapping[PromptText, int]) -> PromptLengths:
        """With these counts too, which are written to the file. Raises StorageError."""
        whole = {**self.tokens, **{digest_of(text): count for text, count in counts.items()}}
        write_whole(self.file, json.dumps(whole).encode())
        return PromptLengths(self.file, whole)

    def too_long(self, texts: Mapping[str, PromptText], max_tokens_total: int) -> dict[str, int]:
        """Of problems by name those that are too long, with their tokens."""
        counts = {name: self.tokens.get(digest_of(text), 0) for name, text in texts.items()}
        return {name: count for name, count in counts.items() if count >= max_tokens_total}

    def has_too_long(self, max_tokens_total: int) -> bool:
        """Whether any text that was counted is too long."""
        return max(self.tokens.values(), default=0) >= max_tokens_total


def may_be_long(config: Config, texts: Iterable[PromptText]) -> list[PromptText]:
    """The texts that do not fit for certain. The others need no tokenizer.

    A tokenizer makes at most one token of a byte. The factor 2 is for those that write some characters in a longer
    form. A chat template writes hardly more around one message than it is long itself.
    """
    environment, folder = config.generation.environment, config.in_run_folder(config.policy.path)
    asking, around = environment.record(PromptSettings), 16
    if environment.prompt_as != "text":
        around += 2 * len(chat_template_text(folder).encode())
    room = min(each.generation.max_tokens_total for each in (config, config.evaluating)) - around
    return [text for text in texts if 2 * sum(len(each.content.encode()) for each in asking.messages(text)) >= room]


def are_counted(environment: EnvironmentSection) -> bool:
    """Whether the environment writes its prompts as the environments here do. A class of the user may not."""
    return not isinstance(environment, EntryPointSection)


def left_out_sentence(what: str, left_out: Mapping[str, int], num_problems: int, limit: str) -> str:
    """How many of `num_problems` are too long, and how long they are. `limit` is the key of the limit and its value."""
    least, most = min(left_out.values()), max(left_out.values())
    tokens = f"{most} tokens" if least == most else f"{least} to {most} tokens"
    return f"{len(left_out)} of {num_problems} {what} are too long: their prompts have {tokens}, and {limit}"


def _key(config: Config) -> str:
    environment, folder = config.generation.environment, config.in_run_folder(config.policy.path)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    settings = environment.model_dump(mode="json", include={*EnvironmentSection.model_fields})
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()
