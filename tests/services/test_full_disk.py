"""A full disk is one sentence and exit code 74: on stdout and in files, by torch's own writers too. On a real tmpfs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.services.test_learner_storage import save, trained_trainer

from nouscoder.atomic_files import StorageError, whole_file
from nouscoder.learner.state.checkpoint import CheckpointStore, Progress

ROOT = Path(__file__).parents[2]
REAL = str(ROOT / "tests" / "data" / "leetcode_200.jsonl.gz")
COMMANDS = [
    ("--help",),
    ("--version",),
    ("recipes",),
    ("recipes", "show", "deepcoder-14b"),
    ("objectives",),
    ("data", "inspect", REAL),
    ("data", "inspect", REAL, "--json"),
]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nouscoder", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "nouscoder: the output cannot be written: No space left on device\n"
    assert done.returncode == 74


def test_torch_on_a_full_disk_leaves_one_sentence_and_no_file(small: Path) -> None:
    state = {"a": torch.zeros(200_000)}
    with (
        pytest.raises(StorageError, match=r"the disk is full: .*state.pt was not written"),
        whole_file(small / "state.pt") as file,
    ):
        torch.save(state, file)
    assert not list(small.iterdir())


def test_a_checkpoint_on_a_full_disk_keeps_the_one_before(small: Path) -> None:
    store, trainer = CheckpointStore(small, keep=5), trained_trainer()
    steps: list[int] = []

    def save_until_it_is_full() -> None:
        for step in range(2, 40, 2):
            steps.append(step)
            save(store, trainer, Progress(step, step // 2 - 1))

    with pytest.raises(StorageError, match=r"the disk is full: .* was not written"):
        save_until_it_is_full()
    newest = store.newest()
    assert (None if newest is None else newest.progress.step) == (steps[-1] - 2 or None)
    assert not list(small.glob("*.part"))
