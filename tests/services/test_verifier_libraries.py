"""Libraries for candidates: copied once, alone in their folder, and omitted with a warning when not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.config import ConfigError, load_config
from nouscoder.verifier.settings import sandbox_config
from nouscoder.verifier.toolchains.libraries import library_folders


def test_a_library_is_copied_once_and_alone(tmp_path: Path) -> None:
    (folder,) = library_folders(["sortedcontainers"], tmp_path)
    assert [entry.name for entry in folder.iterdir()] == ["sortedcontainers"]
    written = (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns
    assert library_folders(["sortedcontainers"], tmp_path) == (folder,)
    assert (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_library_is_omitted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library_folders(["no_such_library"], tmp_path) == ()
    assert caplog.records[0].__dict__["library"] == "no_such_library"


def test_a_missing_folder_is_a_configuration_error(tmp_path: Path) -> None:
    config = load_config(None, [f"verifier.sandbox.site_packages=['{tmp_path}/absent']"])
    with pytest.raises(ConfigError, match="site_packages"):
        sandbox_config(config.verifier)
