"""Libraries for candidates: copied once, alone in their folder; one that cannot be offered is refused at the start."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nouscoder.config import ConfigError, load_config
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import with_libraries
from nouscoder.verifier.sandbox.base import Program, SandboxUnavailable
from nouscoder.verifier.sandbox.local import LocalSandbox
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.toolchains.libraries import CannotOffer, library_folders


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A folder that sandboxes can show."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_library_is_copied_once_and_alone(shelf: Path) -> None:
    (folder,) = library_folders(["sortedcontainers"], [shelf])
    assert [entry.name for entry in folder.iterdir()] == ["sortedcontainers"]
    written = (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns
    assert library_folders(["sortedcontainers"], [shelf]) == (folder,)
    assert (folder / "sortedcontainers" / "__init__.py").stat().st_mtime_ns == written
    assert list(shelf.iterdir()) == [folder]


def test_a_copy_has_compiled_python_and_shared_objects_but_no_tests(shelf: Path) -> None:
    (folder,) = library_folders(["numpy"], [shelf])
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


def test_a_library_that_is_not_installed_is_refused_at_the_start() -> None:
    config = load_config(None, ["verifier.libraries=['numpy', 'no_such_library']"])
    with pytest.raises(
        ConfigError, match=r"verifier\.libraries: candidates cannot import no_such_library: it is not inst"
    ):
        with_libraries(config.verifier)
    pods = load_config(None, ["verifier.libraries=['no_such_library']", "verifier.sandbox.backend=fake"])
    assert with_libraries(pods.verifier) == pods.verifier.sandbox  # they have libraries of their own


@pytest.mark.parametrize("place", ["/tmp/some/share", "/dev/shm/share", "/proc/share"])
def test_copies_are_elsewhere_where_the_sandbox_hides_the_first_place(place: str, shelf: Path, tmp_path: Path) -> None:
    (folder,) = library_folders(["sortedcontainers"], [Path(place), shelf])
    assert folder.parent == shelf
    assert not Path(place).exists()
    with pytest.raises(CannotOffer, match=r"sortedcontainers: .*hidden by the sandbox's own folders.*XDG_CACHE_HOME"):
        library_folders(["sortedcontainers"], [Path(place), tmp_path])


def test_copies_are_elsewhere_where_the_first_place_cannot_be_written(shelf: Path) -> None:
    (folder,) = library_folders(["sortedcontainers"], [Path("/sys/share"), shelf])
    assert folder.parent == shelf
    with pytest.raises(CannotOffer, match="/sys/share"):
        library_folders(["sortedcontainers"], [Path("/sys/share")])


async def test_copies_that_a_umask_made_unreadable_are_refused_before_a_program_runs(shelf: Path) -> None:
    config = load_config(None, ["verifier.sandbox.slots=1"]).verifier.sandbox
    before = os.umask(0o077)
    try:
        (folder,) = library_folders(["sortedcontainers"], [shelf])
    finally:
        os.umask(before)
    assert (folder / "sortedcontainers" / "__init__.py").stat().st_mode & 0o777 == 0o644
    (folder / "sortedcontainers" / "__init__.py").chmod(0o600)
    sandbox = LocalSandbox(config.model_copy(update={"site_packages": (folder,)}))
    with pytest.raises(SandboxUnavailable, match=r"candidates may not read .*sortedcontainers"):
        await sandbox.start()
    await sandbox.close()


def test_a_folder_that_the_sandbox_hides_is_a_configuration_error(tmp_path: Path) -> None:
    config = load_config(None, [f"verifier.sandbox.site_packages=['{tmp_path}']"])
    with pytest.raises(ConfigError, match="is hidden by the sandbox's own folders"):
        with_libraries(config.verifier)


def test_a_missing_folder_is_a_configuration_error(tmp_path: Path) -> None:
    config = load_config(None, [f"verifier.sandbox.site_packages=['{tmp_path}/absent']"])
    with pytest.raises(ConfigError, match="site_packages"):
        with_libraries(config.verifier)
