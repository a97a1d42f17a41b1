"""The tokenizer of a policy folder: converts text and messages to token ids, and back.

INVARIANT: only the tokenizer and its chat template put special tokens into a prompt. The name of a special token in a
text is encoded as ordinary characters, except in a prompt that a chat template has written already. What ends an answer
comes from the chat template, which is rendered with an answer: the same tokens end the examples of a training, and the
last of them ends a completion.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.prompt import rendered_mark
from nouscoder.domain.reasoning import TOKENS
from nouscoder.policy_folder.chat_template import ChatMessage, ChatTemplate, TemplateLimit
from nouscoder.policy_folder.inspection import StopTokensError, stop_token_ids
from nouscoder.policy_folder.pretrained import load_pretrained


class TokenizerError(ValueError):
    """A folder has no usable tokenizer, or a text cannot be encoded. The message names it."""


class SpelledNames:
    """Hides the names of special tokens in messages from the tokenizer, while a chat template writes them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self.mark = secrets.token_hex(16)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._hidden = re.compile(f"{self.mark}([0-9]+){self.mark}")

    def hidden(self, value: Any, of_assistant: bool = False) -> Any:
        """A message, or a part of one, without the names. Tags of reasoning stay in an assistant's."""
        if isinstance(value, dict):
            of_assistant = of_assistant or value.get("role") == "assistant"
            return {name: self.hidden(item, of_assistant) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(item, of_assistant) for item in value]
        if not isinstance(value, str):
            return value

        def mark(found: re.Match[str]) -> str:
            if of_assistant and found[0] in TOKENS:
                return found[0]
            return f"{self.mark}{self._names.index(found[0])}{self.mark}"

        return self._pattern.sub(mark, str(value))

    def parts(self, text: str) -> list[str]:
        """The text divided: what the template has written, a name, and so on in turn."""
        parts = self._hidden.split(text)
        parts[1::2] = [self._names[int(number) % len(self._names)] for number in parts[1::2]]
        return parts


class PolicyTokenizer:
    """A tokenizer. `eos_id` ends a text.

    `pad_id` pads batches. Token ids are below `vocabulary_size`. The chat template is the folder's, if any.
    """

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], folder: Path, date: str = "") -> None:
        """`tokenizer` is one of transformers, from `folder`, whose configuration names `stop_ids`.

        `date` is the day that the chat template writes; see ChatTemplate.
        """
        self._tokenizer = tokenizer
        self._date = date
        self._folder = folder
        self._configured_stop_ids = stop_ids
        self.eos_id: int = min(stop_ids) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.pad_id: int = min(stop_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.vocabulary_size = len(tokenizer)
        special = {token_id: token for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_names = frozenset(token.content for token in special.values())
        self._spelled = SpelledNames(self.special_names)
        self._appended_ids = special.keys() - {tokenizer.unk_token_id}  # after a text, by some tokenizers

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can be used."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def turn_end(self) -> tuple[int, ...]:
        """Token ids [tokens] that the chat template writes after an answer, up to the first special one.

        Special ones that follow it at once belong to it, up to one that ends completions. () without a template, or
        when it writes no special token there. It waits for the template at the first use.
        """
        if not self.has_chat_template:
            return ()
        mark = secrets.token_hex(16)
        conversation = [Message(Role.USER, "-"), Message(Role.ASSISTANT, mark)]
        try:
            (text,) = self.texts([_records(conversation)], None, next_answer=False)
        except TokenizerError:  # it takes no such conversation
            return ()
        ids = self._encode(text.rpartition(mark)[2], add_special_tokens=False, split_special_tokens=False)
        ends = self._configured_stop_ids.union(self._tokenizer.added_tokens_decoder)
        place = next((place for place, token_id in enumerate(ids) if token_id in ends), None)
        if place is None:
            return ()
        adjoining = [*takewhile(lambda at: ids[at] in ends, range(place, len(ids)))]
        stop = next((at for at in adjoining if ids[at] in self._configured_stop_ids), place)
        return tuple(ids[: stop + 1])

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a completion: the configuration's, and the last of `turn_end`, which may wait."""
        return self._configured_stop_ids.union(self.turn_end[-1:])

    def encode(self, text: str) -> list[int]:
        """Token ids [tokens] of a text that begins a prompt, after the special tokens at the start of prompts.

        A text that begins with the mark of a chat template is encoded as a whole prompt.
        """
        if rendered_mark(text):
            return self.encode_whole(text)
        return self._unended(self._encode(text, add_special_tokens=True, split_special_tokens=True))

    def encode_whole(self, text: str) -> list[int]:
        """Token ids [tokens] of a whole prompt: the names of special tokens in it are these tokens.

        The special tokens at the start of prompts come first, unless the text begins with them.
        """
        ids = self._encode(text, add_special_tokens=False, split_special_tokens=False)
        return ids if ids[: len(self._begin)] == self._begin else self._begin + ids

    def encode_inside(self, text: str) -> list[int]:
        """Token ids [tokens] of a text that follows other text. No special token is added."""
        return self._encode(text, add_special_tokens=False, split_special_tokens=True)

    def count(self, texts: Sequence[str]) -> list[int]:
        """How many tokens `encode` makes of each text; 0 of one that cannot be encoded."""
        found = self._encode_each(texts, add_special_tokens=True, split_special_tokens=True)
        pairs = zip(texts, found, strict=True)
        return [len(self.encode(text) if ids and rendered_mark(text) else self._unended(ids)) for text, ids in pairs]

    def count_messages(self, conversations: Sequence[Sequence[Message]], thinking: bool | None = None) -> list[int]:
        """How many tokens each conversation has; 0 of one that cannot be encoded.

        All have messages of the same roles in the same order. Raises TokenizerError when the template refuses them.
        """
        if not conversations:
            return []
        texts = self.texts([_records(messages) for messages in conversations], thinking)
        found = self._encode_each(texts, add_special_tokens=False, split_special_tokens=False)
        return [
            len(self.encode_text(text) if self._spelled.mark in text else ids)
            for text, ids in zip(texts, found, strict=True)
        ]

    def check_template(self) -> None:
        """Raises TokenizerError for a chat template that reaches a limit with the shortest conversation."""
        try:
            self._template.render([[Message(Role.USER, "-")]], None)
        except TemplateLimit as error:
            raise TokenizerError(str(error)) from error
        except ValueError:  # it may refuse a conversation that begins so
            pass

    def texts(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        thinking: bool | None,
        *,
        next_answer: bool = True,
        tools: Sequence[Any] = (),
    ) -> list[str]:
        """What the chat template writes, for `encode_text`; see ChatTemplate.render. Raises TokenizerError."""
        hidden = self._spelled.hidden
        try:
            return self._template.render(hidden(conversations), thinking, next_answer=next_answer, tools=hidden(tools))
        except ValueError as error:  # also of a tokenizer with several templates, none of which is the default
            raise TokenizerError(str(error)) from error

    def spelled(self, answer: str) -> str:
        """An assistant's text as it stands in `texts`."""
        return str(self._spelled.hidden(answer, of_assistant=True))

    def encode_text(self, text: str) -> list[int]:
        """Token ids [tokens] of a text of `texts`: at once, as in the model's training. Raises TokenizerError."""
        ids: list[int] = []
        for number, part in enumerate(self._spelled.parts(text)):
            if part:
                ids += self._encode(part, add_special_tokens=False, split_special_tokens=bool(number % 2))
        return ids

    def encode_after(self, before: str, text: str, *, in_chat: bool = True) -> list[int]:
        """Token ids [tokens] of a text after another one, as in one text. Both are of `texts`, or not `in_chat` plain.

        Where one token would reach over both, `text` is encoded alone: sampling begins after whole tokens.
        """
        if not in_chat and rendered_mark(before):  # the text is an answer, whose names are characters
            text, in_chat = self.spelled(text), True
        encode = self.encode_text if in_chat else self.encode
        first, whole = encode(before), encode(before + text)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        # After another text, because some tokenizers begin a text with a space, or what follows a special token.
        marked = text if in_chat else str(self._spelled.hidden(text))
        for begin in (*self.pieces([self.eos_id]), "\n", ";"):
            first, whole = (self.encode_text(begin + rest) for rest in ("", marked))
            before, found = (self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (first, whole))
            if whole[: len(first)] == first and _num_spaces(found.removeprefix(before)) == _num_spaces(marked):
                return whole[len(first) :]
        return self.encode_text(marked)

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """A conversation for `encode_text`, in any thread, up to the beginning of the policy's answer.

        `thinking` is the template's enable_thinking; None leaves it to the template. It may take seconds. Raises
        TokenizerError.
        """
        return self.texts([_records(messages)], thinking)[0]

    def reply_ids(
        self, replies: Sequence[Message], ended_with: int | None, thinking: bool | None = None, *, in_chat: bool
    ) -> list[int]:
        """Token ids [tokens] from an answer of the policy to the beginning of its next answer. Raises TokenizerError.

        The chat template writes them: the end of the turn, the `replies`, the start of a turn. What the answer has of
        the end is left out: `ended_with` is its stop token; None: it was cut. Not `in_chat`: the contents as text.
        """
        if not in_chat:
            return self.encode_inside("".join(f"\n{reply.content}\n" for reply in replies))
        answer, *marks = (secrets.token_hex(16) for _ in range(len(replies) + 1))
        marked = [Message(reply.role, mark) for reply, mark in zip(replies, marks, strict=True)]
        begin = [Message(Role.USER, "-"), Message(Role.ASSISTANT, answer)]
        text, probe = self.texts([_records([*begin, *replies]), _records([*begin, *marked])], thinking)
        if any(probe.count(mark) != 1 for mark in (answer, *marks)):
            raise TokenizerError("the chat template does not write an answer and the messages after it once each")
        ids = self.encode_text(text.partition(answer)[2])
        ended = [] if ended_with is None else [ended_with]
        for end in ([*self.turn_end], ids[:1]):  # a turn may end with several tokens
            if end and ended == end[-1:] and ids[: len(end)] == end:
                return ids[len(end) :]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id alone, with special tokens. A part of a character is a replacement character."""
        known = {token: str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in set(ids)}
        return [known[token] for token in ids]

    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._tokenizer.get_vocab())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens other than the tags of reasoning."""
        parts: list[list[int]] = [[]]  # each second one is a tag
        for token_id in ids:
            if token_id in self._tags:
                parts += [[token_id], []]
            else:
                parts[-1].append(token_id)
        each = [
            self._tokenizer.decode(part, skip_special_tokens=not place % 2, clean_up_tokenization_spaces=False)
            for place, part in enumerate(parts)
        ]
        return "".join(map(str, each))

    @cached_property
    def _begin(self) -> list[int]:
        """The special tokens at the start of prompts [tokens]."""
        alone, whole = (
            self._encode("a", add_special_tokens=added, split_special_tokens=True) for added in (False, True)
        )
        places = range(len(whole))
        return whole[: next((place for place in places if whole[place : place + len(alone)] == alone), 0)]

    @cached_property
    def _tags(self) -> frozenset[int]:
        """The special tokens that tags of reasoning are made of."""
        return frozenset(self.vocabulary()[tag] for tag in TOKENS & self.special_names)

    @cached_property
    def _template(self) -> ChatTemplate:
        inner = self._tokenizer
        return ChatTemplate(inner.get_chat_template(), inner.special_tokens_map, self._folder, self._date)

    def _encode(self, text: str, **how: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, **how))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise TokenizerError(f"a text of {len(text)} characters cannot be encoded: {error}") from error

    def _encode_each(self, texts: Sequence[str], **how: bool) -> list[list[int]]:
        """The tokens of each text, which are encoded at once; none of one that cannot be encoded."""
        try:
            found: list[list[int]] = self._tokenizer(list(texts), return_attention_mask=False, **how)["input_ids"]
        except Exception:  # of one of them: tokenizers raises plain Exceptions
            return [ids for text in texts for ids in self._encode_each([text], **how)] if len(texts) > 1 else [[]]
        return found

    def _unended(self, ids: list[int]) -> list[int]:
        """A prompt without the end token that some tokenizers append to every text."""
        size = len(ids)
        while size > 1 and ids[size - 1] in self._appended_ids:
            size -= 1
        return ids[:size]


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _records(messages: Sequence[Message]) -> list[ChatMessage]:
    return [{"role": message.role.value, "content": message.content} for message in messages]


def load_tokenizer(folder: Path, date: str = "") -> PolicyTokenizer:
    """The tokenizer of a Hugging Face folder, whose chat template writes the day `date`. Raises TokenizerError."""
    # The library would treat a missing path as the name of a model on a hub.
    if not folder.is_dir():
        raise TokenizerError(f"the policy folder {folder} does not exist")
    # Importing transformers takes seconds.
    from transformers import AutoTokenizer

    try:
        loaded = load_pretrained(AutoTokenizer, folder)
        stop_ids = stop_token_ids(folder)
    except StopTokensError as error:
        raise TokenizerError(str(error)) from error
    except Exception as error:  # invalid files raise many types
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise TokenizerError(f"{folder} holds no tokenizer: {first_line}") from error
    if loaded.eos_token_id is not None:
        stop_ids |= {loaded.eos_token_id}
    if not stop_ids:
        raise TokenizerError(f"neither the tokenizer nor the configuration in {folder} has an end-of-sequence token")
    return PolicyTokenizer(loaded, stop_ids, folder, date)
