"""Run folders: one process at a time, no run is overwritten, every fault is one sentence."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from nouscoder.atomic_files import FolderInUse, StorageError
from nouscoder.config import Config, load_config
from nouscoder.private_folder import sockets_of
from nouscoder.run.folder import RunFolder, RunFolderError, unused_name
from nouscoder.run.local_services import SERVICES, rewrite_addresses


def config_in(root: Path) -> Config:
    return load_config(None, [f'run.root="{root}"', "run.name=mine"])


def test_a_run_is_not_overwritten_and_can_be_reopened(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    RunFolder.create(config).close()
    with pytest.raises(RunFolderError, match="holds a run already: go on with --resume"):
        RunFolder.create(config)
    folder, known = RunFolder.reopen(config.run.folder)
    assert known == config
    folder.close()


def test_resuming_a_missing_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run to resume"):
        RunFolder.reopen(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_one_process_at_a_time_works_in_a_run_folder(tmp_path: Path) -> None:
    first = RunFolder.create(config_in(tmp_path))
    with pytest.raises(FolderInUse, match="another process is working in"):
        RunFolder(first.path)
    first.close()
    RunFolder(first.path).close()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 5 << 20))
    with pytest.raises(StorageError, match=r"disk of .* is full: 5 MiB free, 300 needed"):
        RunFolder.create(config_in(tmp_path))


def test_files_are_replaced_atomically_and_can_be_read(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    folder.write_json("elapsed.json", {"learning_seconds": 1.5})
    assert folder.read_json("elapsed.json") == {"learning_seconds": 1.5}
    assert folder.read_json("missing.json") is None
    assert not list(folder.path.glob("*.part"))
    folder.close()


def test_demo_names_are_never_used_twice(tmp_path: Path) -> None:
    assert unused_name(tmp_path, "demo-0") == "demo-0"
    for expected in ("demo-0.2", "demo-0.3"):
        taken = tmp_path / unused_name(tmp_path, "demo-0")
        taken.mkdir()
        (taken / "config.toml").touch()
        assert unused_name(tmp_path, "demo-0") == expected


def test_every_address_of_a_local_run_is_a_socket_of_its_own_in_a_closed_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    config = rewrite_addresses(folder, config_in(tmp_path))
    addresses = [getattr(getattr(config, name), kind) for name in SERVICES for kind in ("grpc", "metrics")]
    assert len(set(addresses)) == 2 * len(SERVICES)
    sockets = sockets_of(folder.path)
    assert {address.rpartition("/")[0] for address in addresses} == {f"unix:{sockets}"}
    assert all(place.stat().st_mode & 0o077 == 0 for place in (folder.path, sockets))
    assert load_config(folder.config_file) == config
    folder.close()
