"""Which problems a policy was trained on: nouscoder_trained_on.json in its folder has digests of their texts by name.

Runs and fine-tunings write it with every policy. Problems are compared by name, and by text: the prompt and the starter
code, without regard to case and spaces. A name such as taco-7 is the place of a row in a file, so it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from nouscoder.errors import Unusable
from nouscoder.input_file import read_json_object

TRAINED_ON_FILE = "nouscoder_trained_on.json"
_PLACE = re.compile(r"[a-z]\w+(-[a-z]+)?-\d+")  # as imports name rows without a name


def digest_of(prompt: str, starter_code: str) -> str:
    """The digest of a problem's text."""
    text = "\0".join(" ".join(part.split()).casefold() for part in (prompt, starter_code))
    return blake2b(text.encode("utf8", "replace"), digest_size=8).hexdigest()


def trained_on(folder: Path) -> dict[str, str]:
    """What the file says, if it is there. Raises Unusable."""
    file = folder / TRAINED_ON_FILE
    return {name: str(text) for name, text in read_json_object(file, Unusable).items()} if file.is_file() else {}


def joined(known: Mapping[str, str], taught: Mapping[str, str]) -> dict[str, str]:
    """Both; another text of a known name is kept beside it."""
    return {**known} | {
        f"{name} {text}" if known.get(name, text) != text else name: text for name, text in taught.items()
    }


def leak_lines(measured: Mapping[str, str], trained: Mapping[str, str], which: str) -> list[str]:
    """What is to be said of measured problems, named `which`, that are training problems too."""
    texts = {*trained.values()}
    by_name = {name for name in measured.keys() & trained.keys() if not _PLACE.fullmatch(name)}
    by_text = {name for name in measured if measured[name] in texts}
    found = [name for name in measured if name in by_name | by_text]
    return [
        f"warning: {len(found)} of {len(measured)} {which} are training problems, such as {found[0]} ({len(by_name)} by"
        f" name, {len(by_text)} by text): their pass@1 counts what is trained on"
        for _ in found[:1]
    ]
