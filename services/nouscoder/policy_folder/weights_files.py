"""The safetensors files with the weights of a policy: one file, or shards that an index names.

The folder of an adapter has the adapter's file instead, and the weights are those of the first policy.

INVARIANT: a folder has one set of weights files, which every reader takes. Of a folder with model.safetensors beside an
index other programs take either; it is refused, unless none of the files that the index names is there. Tensors that
every model computes itself (`is_ignored`) are never read.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import sha256_of
from nouscoder.domain.policy import Shard
from nouscoder.errors import ExitCode, NousCoderError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The names that PEFT uses.
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

# Tables of rotary embeddings, which checkpoints of Llama 2's time hold.
_IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")
_OF_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>.+)")
LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, as its library bounds it
READERS = 8  # threads; hashing and reading leave Python's lock

# What changes when a file is replaced or written: its inode, its size, and the time of its last change [ns].
FileState = tuple[int, int, int]


class WeightsMissing(NousCoderError):
    """The folder has no readable weights. The message names the invalid file."""

    exit_code = ExitCode.DAMAGED


class WeightsUnusable(NousCoderError):
    """Files of weights cannot be read, or do not fit together. The message names the file."""

    exit_code = ExitCode.DAMAGED


def weights_files(folder: Path) -> tuple[Path, ...]:
    """The shards that the index names, sorted by name. Without an index, the single file.

    An index none of whose files is there is old, if the single file is there. Raises WeightsMissing when the index
    cannot be read or names files outside the folder, and when the folder has both the single file and other shards.
    """
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if not index.is_file():
        return (single,)
    named = sorted(set(index_of(folder).values()))
    files = tuple(folder / name for name in named)
    if WEIGHTS_FILE in named or not single.is_file():
        return files
    there = [file.name for file in files if file.is_file()]
    if there:
        raise WeightsMissing(
            f"{folder} has {WEIGHTS_FILE} and {INDEX_FILE} with other files ({there[0]}), which may hold other weights:"
            " remove those that are not meant"
        )
    return (single,)


def index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says. Raises WeightsMissing."""
    index = folder / INDEX_FILE
    try:
        names: dict[str, str] = dict(json.loads(index.read_text(encoding="utf8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsMissing(f"{index} is not an index of safetensors files: {error}") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names.values()):
        raise WeightsMissing(f"{index} must name files of its own folder")
    return names


def is_sharded(folder: Path) -> bool:
    """Whether the weights are those that the index names. Raises WeightsMissing."""
    return (folder / INDEX_FILE).is_file() and weights_files(folder) != (folder / WEIGHTS_FILE,)


def is_ignored(name: str) -> bool:
    """Whether a tensor of this name is one that a model computes itself."""
    return _IGNORED.fullmatch(name) is not None


# The format of a file: 8 bytes with the length of the header, little endian; the header, JSON with the type and shape
# of each tensor and the place of its bytes; and the bytes of one tensor after the other. Source:
# https://huggingface.co/docs/safetensors (format).


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where the bytes of a tensor lie: from `start` to `end`. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_length(data: bytes) -> int:
    """The length of the header by the first LENGTH_BYTES of a file. Raises WeightsUnusable."""
    length = int.from_bytes(data, "little")
    if len(data) != LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
        raise WeightsUnusable("the bytes are not those of a safetensors file")
    return length


def spans_of(header: bytes, base: int = 0) -> tuple[TensorSpan, ...]:
    """The tensors of a header, which is given without its length, in the order of their bytes.

    `base` is added to each place. Raises WeightsUnusable when tensors do not lie one after the other.
    """
    try:
        named = json.loads(header)
        named.pop("__metadata__", None)
        spans = [
            TensorSpan(
                name, str(about["dtype"]), tuple(about["shape"]), *(base + int(at) for at in about["data_offsets"])
            )
            for name, about in named.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsUnusable(f"the header is not one of weights: {error!r}") from error
    spans.sort(key=lambda span: (span.start, span.end))
    end = base
    for span in spans:
        if span.start != end or span.end < end:
            raise WeightsUnusable(f"{span.name} has a wrong place")
        end = span.end
    return tuple(spans)


def stored_tensors(file: Path) -> dict[str, TensorSpan]:
    """The tensors of a whole safetensors file by name, without ignored ones. Raises WeightsUnusable."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            begin = LENGTH_BYTES + header_length(data.read(LENGTH_BYTES))
            spans = spans_of(data.read(min(begin, size) - LENGTH_BYTES), begin)
    except OSError as error:
        raise WeightsUnusable(f"{file} cannot be read: {error.strerror or error}") from error
    except WeightsUnusable as error:
        raise WeightsUnusable(f"{file} is not a whole safetensors file: {error}") from error
    if not spans or size != spans[-1].end:
        raise WeightsUnusable(f"{file} is not a whole safetensors file: it has {size} bytes")
    return {span.name: span for span in spans if not is_ignored(span.name)}


def stored_weights(folder: Path) -> dict[str, tuple[Path, TensorSpan]]:
    """The tensors of whole weights by name, each with its file, as the headers say.

    Raises WeightsMissing, and WeightsUnusable for damaged files, and tensors that are lacking or in two files.
    """
    found: dict[str, tuple[Path, TensorSpan]] = {}
    for file in weights_files(folder):
        if not file.is_file():
            others = " (only weights in safetensors are read)" if any(folder.glob("*.bin")) else ""
            raise WeightsMissing(f"{folder} has no {file.name}{others}")
        for name, tensor in stored_tensors(file).items():
            if name in found:
                raise WeightsUnusable(f"{file}: {name} is in another shard too")
            found[name] = (file, tensor)
    if is_sharded(folder):
        for name, shard in sorted(index_of(folder).items()):
            if not is_ignored(name) and (name not in found or found[name][0].name != shard):
                raise WeightsUnusable(f"{folder / shard} lacks {name}, which {INDEX_FILE} says it has")
    _check_experts(folder, found)
    return found


def _check_experts(folder: Path, names: Collection[str]) -> None:
    """Raises WeightsUnusable when an expert lacks a tensor that another expert of its layer has."""
    matches = [match for match in map(_OF_EXPERT.fullmatch, names) if match]
    experts: defaultdict[str, set[str]] = defaultdict(set)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for match in matches:
        experts[match["layer"]].add(match["expert"])
        kinds[match["layer"]].add(match["kind"])
    for layer, theirs in experts.items():
        for name in (f"{layer}.{expert}.{kind}" for expert in theirs for kind in kinds[layer]):
            if name not in names:
                raise WeightsUnusable(f"{folder} lacks {name}: its weights are not complete")


def is_adapter(folder: Path) -> bool:
    """Whether the folder of a policy holds an adapter of the first policy, not whole weights."""
    return (folder / ADAPTER_FILE).is_file()


def policy_files(folder: Path, first: Path) -> tuple[Path, ...]:
    """The files with all its tensors: its own, or those of `first` and its adapter. Raises WeightsMissing."""
    return (*weights_files(first), folder / ADAPTER_FILE) if is_adapter(folder) else weights_files(folder)


def state_of(file: Path) -> FileState:
    """The state of a file, which tells whether it has changed. Raises OSError."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def shards_of(folder: Path) -> tuple[Shard, ...]:
    """The weights of a folder as shards of a manifest. Reads every byte. Raises WeightsMissing."""
    with ThreadPoolExecutor(READERS) as readers:
        return tuple(readers.map(shard_of, weights_files(folder)))


def shard_of(file: Path) -> Shard:
    """A file as a manifest names it. Raises WeightsMissing."""
    try:
        return Shard(file.name, sha256_of(file), file.stat().st_size)
    except OSError as error:
        raise WeightsMissing(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightsMissing(f"{file.parent}: {error}") from error
