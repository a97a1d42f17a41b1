"""What learner and generation compare before the first rollout: digests of a policy's tensors and of its tokenizer.

A digest of weights is one of names, types, shapes and bytes of the tensors, so it does not depend on how they are cut
into files. It is made from the files each time: size and time of a file do not tell whether its bytes are the same. The
tensors are hashed by several threads, at the speed of memory for files that were read just before.

INVARIANT: two sets of weights files have one digest exactly if a model gets the same tensors from both. An output layer
with the bytes of another tensor counts as tied to it, saved or not.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nouscoder.atomic_files import sha256_of
from nouscoder.policy_folder.weights_files import READERS, TensorSpan, WeightsUnusable, stored_tensors

_HEAD = "lm_head.weight"
# What turns texts and messages into tokens.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_ENDS_FILE = "generation_config.json"  # says which tokens end an answer


def weights_digest(files: Iterable[Path]) -> str:
    """The digest of the tensors in whole weights files. Reads every byte. Raises WeightsUnusable."""
    found = _tensor_digests(files)
    others = {digest for name, digest in found.items() if not name.endswith(_HEAD)}
    lines = [f"{name} {digest}" for name, digest in found.items() if not (name.endswith(_HEAD) and digest in others)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def differing_tensor(of_learner: Iterable[Path], in_use: Iterable[Path]) -> str | None:
    """The first tensor of the learner's files that is another one in the files in use. Raises WeightsUnusable.

    One that only the files in use hold was lost, unless it is saved twice there, as a tied output layer may be.
    """
    trained, sampled = _tensor_digests(of_learner), _tensor_digests(in_use)
    heads = {digest for name, digest in sampled.items() if name.endswith(_HEAD)}
    differing = (name for name, digest in trained.items() if sampled.get(name) != digest and digest not in heads)
    lost = (name for name, digest in sampled.items() if name not in trained and digest not in trained.values())
    return min([*differing, *lost], default=None)


def odd_tensor(first: Sequence[Path], weights: Iterable[Path]) -> str | None:
    """The first name of a tensor that only one side has, unless it is saved twice in `first`. Reads headers mostly."""
    before, there = ({name for file in files for name in stored_tensors(file)} for files in (first, weights))
    if before == there:
        return None
    digests = _tensor_digests(first)
    twice = {name for name, count in Counter(digests.values()).items() if count > 1}
    return min((name for name in before ^ there if digests.get(name) not in twice), default=None)


def tokenizer_digests(folder: Path) -> tuple[str, ...]:
    """The files of the tokenizer in a policy folder, each as its SHA-256, a space and its name. Raises OSError."""
    there = [folder / name for name in (*TOKENIZER_FILES, _ENDS_FILE) if (folder / name).is_file()]
    return tuple(f"{sha256_of(file)} {file.name}" for file in there)


def differing_file(one: Sequence[str], other: Sequence[str]) -> str | None:
    """The name of the first file of which one of two `tokenizer_digests` has another."""
    return min((line.partition(" ")[2] for line in {*one} ^ {*other}), default=None)


def _tensor_digests(files: Iterable[Path]) -> dict[str, str]:
    """Type, shape and SHA-256 of each tensor, by name."""
    with ThreadPoolExecutor(READERS) as readers:
        found = [(file, name, tensor) for file in files for name, tensor in stored_tensors(file).items()]
        maps = {file: _mapped(file) for file, _, _ in found}
        digests = readers.map(lambda one: _digest(maps[one[0]], one[2]), found)
        return {name: digest for (_, name, _), digest in zip(found, digests, strict=True)}


def _mapped(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as data:
            return mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsUnusable(f"{file} cannot be read: {error}") from error


def _digest(data: mmap.mmap, tensor: TensorSpan) -> str:
    with memoryview(data) as whole, whole[tensor.start : tensor.end] as part:
        return f"{tensor.dtype} {[*tensor.shape]} {hashlib.sha256(part).hexdigest()}"
