"""Folders in places that all users share: no other user makes, reads or replaces them. See private_folder.py."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nouscoder import private_folder as module
from nouscoder.broker.redis_server import RedisServerError, is_own, redis_url, start_redis
from nouscoder.config import JobsSection, VerifierSection, load_config
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problems import ProblemFileError, save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.generation.weights.cache import PolicyCache
from nouscoder.private_folder import NoFolder, NotPrivate, is_trusted, private_folder, socket_folder, temporary_folder
from nouscoder.run.folder import RunFolder, RunFolderError
from nouscoder.store.case_files import CaseFile, CaseFileBroken, packed
from nouscoder.store.tests_cache import TestsCache
from nouscoder.verifier.jobs.store import JobStore
from nouscoder.verifier.sandbox import init_build
from nouscoder.verifier.sandbox.base import SandboxUnavailable

NOBODY = 65534
TESTS = StdinTests((StdinCase("1", "2"),))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")


def of_nobody(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(target)


def file(path: Path) -> None:
    path.touch()


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


HOSTILE = [pytest.param(of_nobody, marks=needs_root), link, file, writable]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def is_closed(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.geteuid()


@pytest.mark.parametrize("prepare", HOSTILE)
def test_a_name_that_another_user_took_first_is_not_used(prepare: Callable[[Path], None], shared: Path) -> None:
    taken = shared / f"nouscoder-tests-{os.geteuid()}"
    prepare(taken)
    with pytest.raises(NotPrivate, match=str(taken)):
        private_folder(taken)
    found = temporary_folder("nouscoder-tests")
    assert found != taken
    assert is_closed(found)
    assert temporary_folder("nouscoder-tests") == found, "the next process finds the same folder"
    assert VerifierSection().tests.folder == found


def test_a_temporary_folder_of_no_use_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(NoFolder, match="no folder can be made in the temporary folder"):
        temporary_folder("nouscoder-tests")


def test_a_folder_of_an_older_release_is_closed_and_used_further(shared: Path) -> None:
    before = shared / f"nouscoder-tests-{os.geteuid()}"
    before.mkdir()
    before.chmod(0o755)
    assert temporary_folder("nouscoder-tests") == before
    assert is_closed(before)


@pytest.mark.parametrize("prepare", HOSTILE)
def test_the_cache_of_tests_passes_over_a_folder_of_another_user(prepare: Callable[[Path], None], shared: Path) -> None:
    prepare(shared / "0")
    cache = TestsCache(shared, 1024**2)
    assert cache._folder == shared / "1"
    assert is_closed(shared / "1")
    cache.close()


def test_the_lock_of_the_cache_follows_no_link(shared: Path, tmp_path: Path) -> None:
    private_folder(shared / "0")
    (shared / "0" / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(NousCoderError, match="cannot be used as a cache of tests"):
        TestsCache(shared, 1024**2)
    assert not (tmp_path / "made").exists()


@needs_root
def test_a_file_of_tests_that_another_user_wrote_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "tests"
    path.write_bytes(packed(TESTS)[0])
    CaseFile(path, is_own=True).close()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(CaseFileBroken, match=f"was written by user {NOBODY}"):
        CaseFile(path, is_own=True)


@pytest.mark.parametrize("prepare", HOSTILE)
def test_a_cache_of_policies_of_another_user_is_one_sentence(prepare: Callable[[Path], None], shared: Path) -> None:
    prepare(shared / "policies")
    with pytest.raises(Unusable, match=r"generation.cache: .*policies"):
        PolicyCache(shared / "policies")


@needs_root
def test_an_index_that_another_user_made_beside_the_problems_is_not_read(shared: Path, tmp_path: Path) -> None:
    save_problems(tmp_path / "p.jsonl", [Problem("p", "Add one.", TESTS)])
    open_index_of(tmp_path / "p.jsonl").close()
    os.chown(tmp_path / "p.jsonl.index", NOBODY, NOBODY)
    open_index_of(tmp_path / "p.jsonl").close()
    (made,) = (shared / f"nouscoder-problems-{os.geteuid()}").iterdir()
    assert (made / "problems.sqlite").is_file()


@pytest.mark.parametrize("prepare", [HOSTILE[0], writable])
def test_a_new_run_is_not_begun_in_a_folder_that_others_can_write(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    prepare(tmp_path / "r")
    with pytest.raises(RunFolderError, match=f"other users can write to {tmp_path}/r"):
        RunFolder.create(load_config(None, [f'run.root="{tmp_path}"', "run.name=r"]))
    assert list((tmp_path / "r").iterdir()) == []


def test_the_lock_of_an_index_follows_no_link(tmp_path: Path) -> None:
    save_problems(tmp_path / "p.jsonl", [Problem("p", "Add one.", TESTS)])
    (tmp_path / "p.jsonl.index").mkdir()
    (tmp_path / "p.jsonl.index" / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(ProblemFileError, match="cannot be written"):
        open_index_of(tmp_path / "p.jsonl")
    assert not (tmp_path / "made").exists()


@needs_root
def test_jobs_are_not_kept_in_a_folder_of_another_user(tmp_path: Path) -> None:
    of_nobody(tmp_path / "jobs")
    with pytest.raises(NotPrivate, match=f"jobs belongs to user {NOBODY}"):
        JobStore(tmp_path / "jobs", JobsSection())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"):
        JobStore(tmp_path / "mine", JobsSection())
    assert not (tmp_path / "made").exists()


@needs_root
@pytest.mark.parametrize("replaced", ["init.so", ""])
def test_a_library_that_another_user_could_write_is_not_loaded(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOUSCODER_INIT_FOLDER", str(tmp_path))
    folder = tmp_path / f"init-{init_build._digest()}"
    folder.mkdir()
    (folder / "init.so").touch()
    assert init_build.init_library_path.__wrapped__() == folder / "init.so"
    os.chown(folder / replaced, NOBODY, NOBODY)
    with pytest.raises(SandboxUnavailable, match="another user could have written"):
        init_build.init_library_path.__wrapped__()


def test_only_files_of_this_user_and_of_root_are_trusted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.touch(0o755)
    (tmp_path / "link").symlink_to(mine)
    assert [is_trusted(path) for path in (mine, tmp_path / "link", tmp_path / "none")] == [True, False, False]
    mine.chmod(0o757)
    assert not is_trusted(mine)


@needs_root
@pytest.mark.parametrize(("group", "trusted"), [(0, True), (NOBODY, False)])
def test_a_group_of_the_user_alone_is_no_other_user(group: int, trusted: bool, tmp_path: Path) -> None:
    """With the umask 002 every folder of such a user is writable for the group."""
    made = tmp_path / "made"
    made.mkdir()
    os.chown(made, 0, group)
    made.chmod(0o775)
    assert is_trusted(made) == trusted


# Folders for unix sockets.


def test_sockets_have_short_paths_and_the_same_folder_at_each_call(shared: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / ("x" * 120), tmp_path / "a name with spaces & more"):
        place = socket_folder(folder)
        assert place.parent == shared or str(place).startswith("/tmp/nouscoder-")
        assert is_closed(place)
        assert socket_folder(folder) == place
        place.rmdir()
        assert socket_folder(folder) == place, "what cleaned the temporary folder did no harm"
        place.rmdir()


@pytest.mark.parametrize("prepare", HOSTILE)
def test_a_link_to_a_folder_of_another_user_is_replaced(
    prepare: Callable[[Path], None], shared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 120)
    place = socket_folder(folder)
    place.rmdir()
    prepare(place)
    other = socket_folder(folder)
    assert other != place
    assert is_closed(other)
    other.rmdir()


# The Redis of a run.

# Listens as another user, and says that it is the process of its first argument.
_STRANGER = r"""
import os, socket, sys
path, uid, pid = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
os.chmod(path, 0o777)
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
listening.listen(16)
print("listening", flush=True)
while True:
    caller, _ = listening.accept()
    while asked := caller.recv(65536):
        hello = b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n"
        for command in asked.upper().split(b"*")[1:]:
            info = b"redis_version:7.0.0\r\nprocess_id:" + pid + b"\r\n"
            answer = b"$%d\r\n%s\r\n" % (len(info), info) if b"INFO" in command else b"+PONG\r\n"
            caller.sendall(hello if b"HELLO" in command else answer)
"""


@needs_root
@pytest.mark.parametrize(
    ("uid", "sentence"), [(NOBODY, f"a process of user {NOBODY} listens"), (0, r"process \d+ \(python.*is no Redis")]
)
def test_a_redis_that_is_not_ours_is_not_used_and_ends_nobody(uid: int, sentence: str, tmp_path: Path) -> None:
    path = redis_url(tmp_path / "redis").removeprefix("unix://")
    with subprocess.Popen(["sleep", "60"]) as victim:
        command = [sys.executable, "-c", _STRANGER, path, str(uid), str(victim.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"listening\n"
            with pytest.raises(RedisServerError, match=sentence):
                start_redis(tmp_path / "redis")
            assert (victim.poll(), other.poll()) == (None, None)
            other.kill()
        victim.kill()


def test_the_address_of_an_older_release_is_the_runs_own(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    old = f"unix:///tmp/nouscoder-redis-{os.getuid()}-0123456789abcdef.sock"
    assert all(is_own(url, folder) for url in (redis_url(folder), f"unix://{folder}/redis.sock", old))
    assert not any(is_own(url, folder) for url in ("redis://127.0.0.1:6379", "unix:///run/redis.sock", ""))


def test_only_this_user_reaches_the_socket_of_redis(tmp_path: Path) -> None:
    server = start_redis(tmp_path / "redis")
    try:
        path = Path(server.url.removeprefix("unix://"))
        assert is_closed(path.parent)
        assert stat.S_ISSOCK(path.stat().st_mode)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
    finally:
        server.close()
    assert module.sockets_of(tmp_path / "redis") == path.parent


def test_a_folder_that_was_moved_to_a_longer_path_gets_other_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 30)
    (deep / "sockets").mkdir(parents=True)
    (deep / "sockets" / "old").touch()
    place = socket_folder(deep)
    assert (deep / "sockets").is_symlink()
    assert place == socket_folder(deep)
    assert not [*place.iterdir()]
    place.rmdir()
