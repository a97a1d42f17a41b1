"""Libraries for candidates: copied once, alone in their folder, and omitted with a warning when not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nouscoder.config import ConfigError, load_config
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import with_libraries
from nouscoder.verifier.sandbox.base import Program
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.toolchains.libraries import library_folders


def test_a_library_is_copied_once_and_alone(tmp_path: Path) -> None:
    (folder,) = library_folders(["sortedcontainers"], tmp_path)
    assert [entry.name for entry in folder.iterdir()] == ["sortedcontainers"]
    written = (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns
    assert library_folders(["sortedcontainers"], tmp_path) == (folder,)
    assert (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [folder]


def test_a_copy_has_compiled_python_and_shared_objects_but_no_tests(tmp_path: Path) -> None:
    (folder,) = library_folders(["numpy"], tmp_path)
    assert {entry.name for entry in folder.iterdir()} >= {"numpy", "numpy.libs"}
    assert list(folder.glob("numpy/__pycache__/__init__.*.pyc"))
    assert not list(folder.rglob("tests"))


async def test_candidates_can_import_the_default_libraries_in_the_local_sandbox() -> None:
    config = load_config(None, ["verifier.sandbox.slots=1"])
    sandbox = LocalSandbox(with_libraries(config.verifier))
    await sandbox.start()
    try:
        code = (
            "import numpy, networkx, sortedcontainers\n"
            "ones = numpy.ones((300, 300))\n"
            "print(int((ones @ ones).sum()), int(numpy.linalg.inv(numpy.eye(9))[0, 0]))\n"
            "print(networkx.shortest_path_length(networkx.path_graph(5), 0, 4), sortedcontainers.SortedList([2, 1])[0])"
        )
        async with sandbox.session(Program(installed()["python"], code, Limits())) as session:
            result = await session.run(b"")
        assert result.stdout.split() == [b"27000000", b"1", b"4", b"1"], result.stderr
    finally:
        await sandbox.close()


def test_a_missing_library_is_omitted_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library_folders(["no_such_library"], tmp_path) == ()
    assert caplog.records[0].__dict__["library"] == "no_such_library"


def test_a_missing_folder_is_a_configuration_error(tmp_path: Path) -> None:
    config = load_config(None, [f"verifier.sandbox.site_packages=['{tmp_path}/absent']"])
    with pytest.raises(ConfigError, match="site_packages"):
        with_libraries(config.verifier)
