"""The program in a model's answer: the last fenced block that can be one in a language asked for. Pure.

The form of blocks is that of CommonMark's fenced code blocks, with the liberties that models take:

    answer     = { text | reasoning | block }
    reasoning  = "<think>" text ("</think>" | end of text)    or another pair of tags of domain/reasoning.py
               | answer "</think>"                            opened by the prompt: blocks in it do not count
    block      = opening { line } (closing | the line before an opening with a tag or before "</think>" | end of text)
    opening    = indentation fence [info]                     info: no backtick after a fence of backticks
               | text fence [tag]                             the fence has backticks and ends the line
    closing    = indentation fence [rest]                     less than 4 columns more indented than the opening
               | code fence                                   at the end of a line of code that is no comment
    fence      = "```" | "~~~" | longer; a closing one has the opening one's character and at least its length
    rest       = special tokens, tags, punctuation or text; nothing after a fence of tildes

- `<think>` counts at the begin of a line outside of blocks, and `</think>` in a block only at the begin of a line.
  Where the prompt ends with `<think>` (`Submission.prompt`), it is put before the completion.
- The indentation of the opening fence, or what follows a list's marker, is removed from the lines of the block: at
  most as much as its first line has.
- In a block of Python, fences inside a string of three quotes are text, when they are pairs and the string is closed.
- Special tokens at the end of a block that is never closed are removed, and the marks `>` of a block in a quotation.
- A block without a language's tag may hold a whole answer: a tag of a language opens a block in it with any fence.

Of the blocks that are not blank, the last of the best class counts: (3) the tag names a language asked for; (2) there
is no tag, or one that names nothing known, and the block has what a program needs (`_NEEDED`); (1) it has not; (0) the
tag names no program (`text`, `output`, `json`, ...). A block in another known language is no program: a right program
of it would only be a compile_error. Where several languages are asked for, the tag says which it is, and a block
without a known tag is in the first of them. A tag also means a language of the same family (`_FAMILIES`), such as `c`
for cpp.

For the lcb profile the rule is LiveCodeBench's: the lines between the last two lines that contain "```", in the whole
completion. Reasoning is not looked for, so blocks in reasoning that was never closed count.

INVARIANT: time and memory are linear in the length of the text. Scanning goes back once at most, and ends after
MAX_MARKS lines with a fence or a tag: the block that is open there extends to the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from nouscoder.domain import reasoning
from nouscoder.domain.languages import KNOWN
from nouscoder.domain.submission import LANGUAGES, MathTests, Profile, Submission, language_name

_MARK = re.compile(f"```|~~~|{reasoning.TAGS}")
_AT_BEGIN = re.compile(r"([ \t\xa0]*)(`{3,}|~{3,})(.*)")
_END_OF_CODE = re.compile(r"(?:\s|\.|<[^<>`]{1,60}>)*+")
_CONTAINER = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)*")
_TAG = re.compile(r"\s*\{?\s*\.?([\w+#.-]*)[^\s`]*")
_COMMENTS = ("#", "//", "/*", "* ", "*/", "--")
_ENDS_OF_TEXT = " \t>:*_|.,!-\ufeff"  # before a fence without a tag that ends a line of text
_SPECIAL_TOKENS = re.compile(r"(?:\s*(?:<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</?s>|<eos>|<end_of_turn>))+\s*\Z")
_BOTH = re.compile(r"[ \t]*`{3,}[^`\w][^`]*(?P<fence>`{3,})(?P<tag>\w[\w+#.-]*)[ \t]*")  # closes and opens
_QUOTED = re.compile(r"^[ \t]*(?:> ?)+", re.MULTILINE)
_TAIL_CHARS = 300
MAX_MARKS = 10_000
MAX_STRINGS_CHARS = 200_000  # of a block, in which strings are followed
_PYTHON_TOKEN = re.compile(
    r"""#[^\n]*|'''|\"\"\"|'(?:[^'\\\n]|\\.)*+'?|"(?:[^"\\\n]|\\.)*+"?""", re.DOTALL
)  # fmt: skip
_TAB_COLUMNS = 4
_TAGS_OF_OTHERS = (
    "text txt plain plaintext output out stdout input in stdin console terminal shell-session powershell zsh json yaml"
    " yml xml html css markdown md mermaid diff latex tex math csv sql ini toml log dockerfile makefile pseudocode"
    " traceback error"
)
_NO_PROGRAMS = frozenset(_TAGS_OF_OTHERS.split())


class FoundProgram(NamedTuple):
    """A program and its language, which is one of those asked for."""

    code: str
    language: str


def text_to_grade(submission: Submission) -> FoundProgram | None:
    """The program in a submission's completion, or the answer for math tests. None when there is nothing to grade."""
    completion = reasoning.begun_by(submission.prompt, submission.completion or "")
    if not isinstance(submission.tests, MathTests):
        return extract_program(completion, submission.languages, submission.profile)
    _, answer = reasoning.parted(completion)
    return FoundProgram(answer, submission.language) if answer and answer.strip() else None


def extract_program(
    completion: str, languages: Sequence[str], profile: Profile = Profile.PROCESS
) -> FoundProgram | None:
    """The program in `completion`, in one of `languages`. None when there is none; the verdict is then no_code."""
    if profile.is_lcb:
        # LiveCodeBench's rule (lcb_runner/utils/extraction_utils.py).
        closing = completion.rfind("\n", 0, max(0, completion.rfind("```")))
        opening = completion.rfind("```", 0, max(0, closing))
        begin = completion.find("\n", opening)
        code = None if opening < 0 else completion[begin + 1 : closing]
        found = None if code is None else FoundProgram(code, languages[0])
    else:
        found = _Scan(completion.replace("\r\n", "\n"), languages).program()
    return found if found is not None and found.code.strip() else None


def extract_code(completion: str, language: str = "python", profile: Profile = Profile.PROCESS) -> str | None:
    """The code of the program in `completion`, where one language is asked for."""
    found = extract_program(completion, (language,), profile)
    return None if found is None else found.code


@dataclass(slots=True)
class _Open:
    """The block that is open. `begin` is the offset of its first line, `columns` the indentation of its fence.

    `deep_fence`: the end before the first bare fence that is indented too far to close it. It counts when nothing else
    closes the block.
    """

    fence: str
    tag: str
    columns: int
    begin: int
    deep_fence: int = -1


@dataclass(slots=True)
class _Found:
    """The best block so far: the last of the best class (`rank`)."""

    rank: int
    begin: int
    end: int
    columns: int
    language: str
    is_quoted: bool


class _Strings:
    """Follows the strings of three quotes in a block of Python.

    `suspended` is the offset of the first line with a fence in a string. It stays until the fences are pairs and the
    string is closed.
    """

    def __init__(self, text: str, begin: int) -> None:
        self._text, self._at, self._quote = text, begin, ""
        self._end = begin + MAX_STRINGS_CHARS
        self._is_odd = False
        self.suspended = -1

    def is_inside(self, place: int) -> bool:
        """Whether `place`, which is not before earlier ones, is inside a string. Far from the begin it never is."""
        if place > self._end:
            return False
        while self._at < place:
            if self._quote:
                end = self._closing(place)
                self._at, self._quote = (place, self._quote) if end < 0 else (end, "")
                continue
            token = _PYTHON_TOKEN.search(self._text, self._at, place)
            self._at = place if token is None else token.end()
            if token is not None and token.group() in ("'''", '"""'):
                self._quote = token.group()
        return bool(self._quote)

    def _closing(self, place: int) -> int:
        at = self._at
        while (end := self._text.find(self._quote, at, place)) >= 0:
            slashes = end - len(self._text[at:end].rstrip("\\")) - at
            if slashes % 2 == 0:
                return end + 3
            at = end + 1
        return -1

    def note(self, line: int, *, is_bare: bool) -> bool:
        """Note a fence inside a string. False when it can be none there: the second of a pair has no tag."""
        self.suspended = line if self.suspended < 0 else self.suspended
        if self._is_odd and not is_bare:
            return False
        self._is_odd = not self._is_odd
        return True

    def is_broken(self, place: int) -> bool:
        """Whether fences that were inside strings up to `place` were none: no pairs, or the string is still open."""
        return self.suspended >= 0 and (self.is_inside(place) or self._is_odd)


class _Scan:
    """Goes through the lines that have a fence or a tag, and keeps the best block."""

    def __init__(self, text: str, languages: Sequence[str]) -> None:
        self._text, self._languages = text, languages
        self._found: _Found | None = None
        self._open: _Open | None = None
        self._strings: _Strings | None = None
        self._has_gone_back = False

    def program(self) -> FoundProgram | None:
        """The program; None when there is no block that is not blank."""
        text, at = self._text, 0
        for num_marks in count():
            mark = _MARK.search(text, at) if num_marks < MAX_MARKS else None
            if mark is not None:
                begin = max(at, text.rfind("\n", at, mark.start()) + 1)
                end = text.find("\n", mark.end())
                end = len(text) if end < 0 else end
                at = self._outside(begin, end) if self._open is None else self._inside(self._open, begin, end)
            elif self._strings is not None and self._strings.is_broken(len(text)):
                at = self._go_back(self._strings)
            else:
                break
        if self._open is not None:
            tail = max(self._open.begin, len(text) - _TAIL_CHARS)
            special = _SPECIAL_TOKENS.search(text, tail)
            self._close(self._open, len(text) if special is None else special.start(), is_closed=False)
        found = self._found
        if found is None:
            return None
        code = text[found.begin : found.end]
        return FoundProgram(
            _without_indentation(_QUOTED.sub("", code).removesuffix("\n") if found.is_quoted else code, found.columns),
            found.language,
        )

    def _outside(self, begin: int, end: int) -> int:
        """Take a line outside of blocks. Returns where to go on."""
        line = self._text[begin:end]
        opened = reasoning.OPENING.search(self._text, begin, end)
        if opened is not None and "```" not in self._text[begin : opened.start()]:
            closing = reasoning.CLOSING[opened["tag"]]
            at = self._text.find(closing, opened.end())
            return len(self._text) if at < 0 else at + len(closing)
        for closed in reasoning.CLOSED.finditer(self._text, begin, end):
            self._found = None
            line = self._text[closed.end() : end]
        if (opening := _opening(line)) is not None:
            self._begin(*opening, end)
        return end

    def _inside(self, block: _Open, begin: int, end: int) -> int:
        """Take a line inside a block. Returns where to go on."""
        line, strings = self._text[begin:end], self._strings
        if reasoning.CLOSED.match(line.lstrip(" \t")):
            if _is_in(strings, begin):
                return end
            self._close(block, begin - 1, is_closed=False)
            return self._outside(begin, end)
        code_end = _closed_at(block, line)
        reopening = None if code_end is not None else _reopening(block, line)
        if code_end is None and reopening is None:
            if block.deep_fence < 0 and line.strip() == block.fence and not _is_in(strings, begin):
                block.deep_fence = begin - 1
            return end
        if strings is not None and strings.is_inside(begin + (code_end or 0)):
            is_pair = strings.note(begin, is_bare=reopening is None)
            return end if is_pair else self._go_back(strings)
        if strings is not None and strings.is_broken(begin):
            return self._go_back(strings)
        self._close(block, begin + code_end if code_end else begin - 1, is_closed=reopening is None)
        if reopening is not None:
            self._begin(*reopening, end)
        elif reasoning.CLOSED.search(line):
            self._found = None
        return end

    def _begin(self, fence: str, tag: str, columns: int, end: int) -> None:
        """Open a block whose opening line ends at `end`."""
        self._open = _Open(fence, tag, columns, min(end + 1, len(self._text)))
        is_python = _family(language_name(tag or self._languages[0])) == "python"
        follows = is_python and not self._has_gone_back
        self._strings = _Strings(self._text, self._open.begin) if follows else None

    def _go_back(self, strings: _Strings) -> int:
        """What was taken for a string was none. From its first fence on, strings are not followed any more."""
        self._has_gone_back, self._strings = True, None
        return strings.suspended

    def _close(self, block: _Open, end: int, *, is_closed: bool) -> None:
        self._open = self._strings = None
        if not is_closed and block.deep_fence >= 0:
            end = block.deep_fence
        code = self._text[block.begin : max(block.begin, end)]
        language = _language_of(block.tag, self._languages)
        if language is None or not code.strip():
            return
        rank = _class_of(block.tag, code, language)
        if self._found is None or rank >= self._found.rank:
            opening = self._text.rfind("\n", 0, block.begin - 1) + 1
            is_quoted = self._text[opening : block.begin].lstrip().startswith(">")
            self._found = _Found(rank, block.begin, max(block.begin, end), block.columns, language, is_quoted)


def _language_of(tag: str, languages: Sequence[str]) -> str | None:
    """The language of a block, out of those asked for. None: it is in another one."""
    named = language_name(tag, any_standard=True)
    if named in languages:
        return named
    if named not in LANGUAGES:
        return languages[0]
    return next((language for language in languages if _family(language) == _family(named)), None)


def _family(language: str) -> str | None:
    """The family of a language: programs in one of the same family are taken for it. None for an unknown one."""
    known = KNOWN.get(language)
    return None if known is None else known.family


def _class_of(tag: str, code: str, language: str) -> int:
    """3 and 2 for a block that can be the program, 1 for one that hardly can, 0 for one whose tag says it is none."""
    if _is_of_language(tag) or tag in _NO_PROGRAMS:
        return 0 if tag in _NO_PROGRAMS else 3
    needs = KNOWN[language].needs if language in KNOWN else ()
    return 2 if (any(word in code for word in needs) if needs else not tag) else 1


def _is_in(strings: _Strings | None, place: int) -> bool:
    return strings is not None and strings.is_inside(place)


def _is_known(tag: str) -> bool:
    return tag in _NO_PROGRAMS or _is_of_language(tag)


def _is_of_language(tag: str) -> bool:
    return language_name(tag, any_standard=True) in LANGUAGES


def _opening(line: str) -> tuple[str, str, int] | None:
    """(fence, tag, columns of indentation) of a line that can open a block."""
    found = _AT_BEGIN.fullmatch(line)
    if found is not None:
        spaces, fence, info = found.groups()
        return None if fence[0] == "`" and "`" in info else (fence, _tag(info), _columns(spaces))
    before, fence, rest = _last_run(line)
    tag = rest.rstrip()
    if not before.strip() or not fence or (tag and not tag[0].isalnum()) or " " in tag or "```" in before:
        return None
    if not tag and before[-1] not in _ENDS_OF_TEXT:
        return None
    container = _CONTAINER.match(line)
    return fence, _tag(tag), _columns(container.group()) if container is not None else 0


def _reopening(block: _Open, line: str) -> tuple[str, str, int] | None:
    """The opening in a line with a tag inside a block that was never closed, or that the line closes first."""
    both = _BOTH.fullmatch(line)
    opening = _opening(line) if both is None else (both["fence"], _tag(both["tag"]), 0)
    if opening is None or not opening[1]:
        return None
    is_within = _is_of_language(opening[1]) and not _is_of_language(block.tag)
    if not (opening[0].startswith(block.fence) or is_within):
        return None
    found = _AT_BEGIN.fullmatch(line)
    if found is not None and both is None:
        return opening if _columns(found[1]) < block.columns + 4 else None
    return opening if _is_known(opening[1]) and not line.lstrip().startswith(_COMMENTS) else None


def _closed_at(block: _Open, line: str) -> int | None:
    """Where the code of a line that closes the block ends: 0 for a line without code. None when it does not close."""
    found = _AT_BEGIN.fullmatch(line)
    if found is None:
        before, fence, rest = _last_run(line)
        is_code = before.strip() and "```" not in before and not line.lstrip().startswith(_COMMENTS)
        fits = fence.startswith(block.fence) and _END_OF_CODE.fullmatch(rest)
        return len(before) if is_code and fits else None
    spaces, fence, rest = found.groups()
    if not fence.startswith(block.fence) or _columns(spaces) >= block.columns + 4:
        return None
    if not rest.strip():
        return 0
    has_tag = rest[0].isalnum() or rest[0] == "{" or _is_known(rest.strip().lower())
    return None if fence[0] == "~" or "`" in rest or has_tag else 0


def _last_run(line: str) -> tuple[str, str, str]:
    """The line as what is before its last fence of backticks, that fence, and what is behind it. No fence: empty."""
    behind = line.rfind("```") + 3
    if behind < 3:
        return line, "", ""
    begin = len(line[:behind].rstrip("`"))
    return line[:begin], line[begin:behind], line[behind:]


def _tag(info: str) -> str:
    found = _TAG.match(info)
    return "" if found is None else found[1].lower()


def _columns(spaces: str) -> int:
    return len(spaces.expandtabs(_TAB_COLUMNS))


def _without_indentation(code: str, columns: int) -> str:
    """The lines without the indentation of their fence, at most as much of it as the first line has."""
    first = next((line for line in code.split("\n") if line.strip()), "") if columns else ""
    columns = min(columns, _columns(first[: len(first) - len(first.lstrip(" \t"))]))
    if not columns:
        return code
    return "\n".join(_less_indented(line, columns) for line in code.split("\n"))


def _less_indented(line: str, columns: int) -> str:
    spaces = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" in spaces[:columns]:
        expanded = spaces[:columns].expandtabs(_TAB_COLUMNS)
        return expanded[columns:] + line[min(columns, len(spaces)) :]
    return line[min(columns, len(spaces)) :]
