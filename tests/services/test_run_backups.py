"""`nouscoder runs backup` and `restore`: a copy of a run that goes on is of one instant, and a run goes on from it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nouscoder.atomic_files import FolderInUse, lock_file, numbered, remove, whole_folder, write_whole
from nouscoder.cli.app import app
from nouscoder.config import Config, RunSection
from nouscoder.errors import Unusable
from nouscoder.run import backups
from nouscoder.run.backups import back_up, backups_in, restore
from nouscoder.run.runs import runs_in


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = Config(run=RunSection(root=tmp_path / "runs", name="demo"))
    begin(made.run.folder, "a" * 32, 0)
    return made


def begin(run: Path, run_id: str, step: int) -> None:
    write_whole(run / "identity.json", json.dumps({"run_id": run_id}).encode())
    checkpoint(run, step)


def checkpoint(run: Path, step: int) -> None:
    with whole_folder(run / "checkpoints" / f"{step:08d}") as part:
        (part / "state").write_bytes(step.to_bytes(4, "big") * 1000)


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backup is a second later than the one before."""
    seconds = iter(range(100))
    monkeypatch.setattr("nouscoder.run.backups.time.strftime", lambda *_: f"20261129-0300{next(seconds):02d}")


@contextmanager
def learner_at_work(run: Path) -> Iterator[threading.Event]:
    """What a learner does with its files, faster: it keeps two checkpoints, and the batches after the older one."""
    end, begun, step = threading.Event(), threading.Event(), 0

    def work() -> None:
        nonlocal step
        while not end.is_set():
            step += 1
            write_whole(run / "batches" / f"{step:08d}.batch", b"batch" * 10_000)
            with (run / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"step": step}) + "\n")
            if step % 3 == 0:
                checkpoint(run, step)
                old, *_ = kept = [*numbered(run / "checkpoints")][-2:]
                for number, path in numbered(run / "checkpoints").items():
                    if number not in kept:
                        remove(path)
                for number, path in numbered(run / "batches", ".batch").items():
                    if number <= old:
                        remove(path)
            begun.set()
            end.wait(0.01)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert begun.wait(10)
        yield end
    finally:
        end.set()
        worker.join()


def test_a_copy_of_a_run_that_goes_on_is_of_one_instant(config: Config, tmp_path: Path) -> None:
    with learner_at_work(config.run.folder):
        made = [back_up(config, tmp_path / "to", 20) / "demo" for _ in range(12)]
    for run in made:
        newest = max(numbered(run / "checkpoints"))
        lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        saved = [*numbered(run / "batches", ".batch")]
        assert lines == [*range(1, len(lines) + 1)]
        assert newest <= len(lines) <= max(saved, default=0)
        assert saved == [*range(saved[0], saved[-1] + 1)]
        assert saved[0] <= newest + 1, "a batch after the checkpoint is missing"
        assert [*run.rglob("*.part")] == []


def test_runs_are_listed_while_a_learner_renames_and_removes_folders(config: Config) -> None:
    """Path.glob raised when a folder went between its name and its content."""
    run, end = config.run.folder, threading.Event()

    def work() -> None:
        while not end.is_set():
            checkpoint(run, 1)
            remove(run / "checkpoints" / f"{1:08d}")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(500):
            assert runs_in(run.parent)["demo"].step in (0, 1)
    finally:
        end.set()
        worker.join()


def test_a_run_that_never_stands_still_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "_PAUSE_S", 0)
    looks = iter(range(10_000))
    monkeypatch.setattr(backups, "_look", lambda run: {Path("identity.json"): (next(looks), 0, 0)})
    with pytest.raises(Unusable, match=r"runs/demo changed at each of 300 looks: .* while the learner is stopped"):
        back_up(config, tmp_path / "to", 1)
    assert backups_in(tmp_path / "to") == []


def test_a_copy_that_was_cut_off_is_no_backup_and_the_next_one_removes_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "to"
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(backups, "_name_when_flushed", killed)
        back_up(config, to, 1)
    (torn,) = to.glob("*.part")
    assert backups_in(to) == []
    remove(config.run.folder)
    for name in (torn.name, torn.stem):
        with pytest.raises(Unusable, match=f"there is no backup {name} of run demo in .*; there are: none"):
            restore(config, to / name)
    assert not config.run.folder.exists()
    begin(config.run.folder, "a" * 32, 3)
    made = back_up(config, to, 1)
    assert backups_in(to) == [made]
    assert not torn.exists()
    with lock_file(to / ".lock", "x"), pytest.raises(FolderInUse, match="another backup is being made in"):
        back_up(config, to, 1)


def test_old_backups_go_and_the_last_one_of_a_lost_run_stays(config: Config, tmp_path: Path) -> None:
    to, run = tmp_path / "to", config.run.folder
    first = [back_up(config, to, 2) for _ in range(3)]
    assert backups_in(to) == first[1:]
    remove(run)
    with pytest.raises(Unusable, match="there is no run in"):
        back_up(config, to, 2)
    begin(run, "b" * 32, 0)  # as after a claim was lost
    later = [back_up(config, to, 2) for _ in range(4)]
    assert backups_in(to) == [first[-1], *later[2:]]


def test_what_did_not_change_is_not_copied_again(config: Config, tmp_path: Path) -> None:
    run = config.run.folder
    run.joinpath("config.toml").write_text("secret = 1")
    run.joinpath("config.toml").chmod(0o600)
    for left_out in ("redis/appendonly.aof", "logs/broker.log"):
        (run / left_out).parent.mkdir()
        (run / left_out).write_text("x")
    (run / "sockets").symlink_to(tmp_path / "gone")
    kept = run / "kept" / "00000001.checkpoint"
    kept.mkdir(parents=True)
    kept.joinpath("state").hardlink_to(run / "checkpoints" / "00000000" / "state")
    one, other = (back_up(config, tmp_path / "to", 5) / "demo" for _ in range(2))
    state = Path("checkpoints", "00000000", "state")
    assert (one / state).stat().st_ino == (other / state).stat().st_ino
    assert (one / state).stat().st_ino == (one / "kept" / "00000001.checkpoint" / "state").stat().st_ino
    assert (other / "config.toml").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in other.iterdir()) == ["checkpoints", "config.toml", "identity.json", "kept"]
    checkpoint(run, 1)
    (run / "config.toml").write_text("secret = 2")  # as long as before
    third = back_up(config, tmp_path / "to", 5) / "demo"
    assert (third / "config.toml").read_text() == "secret = 2"
    assert (other / "config.toml").read_text() == "secret = 1"


def test_a_restore_never_replaces_a_run_and_is_done_once(config: Config, tmp_path: Path) -> None:
    to, run = tmp_path / "to", config.run.folder
    checkpoint(run, 4)
    backup = back_up(config, to, 5)
    checkpoint(run, 9)
    with pytest.raises(
        Unusable, match=rf"{run} holds a run at step 9, and backup {backup.name} is at step 4: .*setAside"
    ):
        restore(config, backup)
    with lock_file(run / ".lock", "x"), pytest.raises(FolderInUse, match="a process is working in"):
        restore(config, backup, "demo-9")
    assert [*runs_in(run.parent)] == ["demo"]
    assert restore(config, backup, "demo-9") == f"{run} is restored from {backup.name}, at step 4"
    assert {name: found.step for name, found in runs_in(run.parent).items()} == {"demo": 4, "demo-9": 9}
    checkpoint(run, 5)
    for again in ("", "demo-9"):  # the pod starts again, and the run is not thrown back
        assert "was restored from" in restore(config, backup, again)
    assert {name: found.step for name, found in runs_in(run.parent).items()} == {"demo": 5, "demo-9": 9}
    restore(config, backup, "demo-5")  # the same backup, once more
    assert {name: found.step for name, found in runs_in(run.parent).items()} == {"demo": 4, "demo-5": 5, "demo-9": 9}
    other = back_up(config, to, 5)
    with pytest.raises(Unusable, match="an unused name"):
        restore(config, other, "demo-9")


def test_backups_stay_outside_the_runs_and_a_run_that_is_set_aside_stays_among_them(
    config: Config, tmp_path: Path
) -> None:
    """A backup in a run's folder was part of the next one, and `../x` took the run out of run.root."""
    for place in ("runs", "runs/demo/backups"):
        with pytest.raises(Unusable, match="name a folder outside"):
            back_up(config, tmp_path / place, 7)
    made = back_up(config, tmp_path / "backups", 7)
    for name in ("../x", "/x", ".", "a/b", ".hidden"):
        with pytest.raises(Unusable, match="is not the name of a run"):
            restore(config, made, name)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["backups", "runs"]
    assert list((tmp_path / "runs").iterdir()) == [config.run.folder]


MOMENTS = {"copied": "pathlib.Path.rename", "set aside": "nouscoder.run.backups._name_when_flushed"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restore_that_was_killed_is_done_by_the_next_start(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run, backup = config.run.folder, back_up(config, tmp_path / "to", 5)
    checkpoint(run, 9)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(MOMENTS[moment], killed)
        restore(config, backup, "old")
    assert [*runs_in(run.parent)] == (["old"] if moment == "set aside" else ["demo"])
    restore(config, backup, "old")
    assert {name: found.step for name, found in runs_in(run.parent).items()} == {"demo": 0, "old": 9}
    assert [path.name for path in run.parent.glob("*.part")] == []


def test_the_commands_say_what_they_did_and_which_backups_there_are(config: Config, tmp_path: Path) -> None:
    values, to = ["--set", f"run.root={config.run.root}", "--set", "run.name=demo"], str(tmp_path / "to")
    said = CliRunner().invoke(app, ["runs", "backup", "--to", to, *values])
    assert said.output == "backup 20261129-030000 is whole: demo at step 0\n"
    remove(config.run.folder)
    wrong = CliRunner().invoke(app, ["runs", "restore", f"{to}/20261129-0400", *values])
    assert "there are: 20261129-030000 (step 0)" in str(wrong.exception)
    said = CliRunner().invoke(app, ["runs", "restore", f"{to}/20261129-030000", *values])
    assert said.output == f"{config.run.folder} is restored from 20261129-030000, at step 0\n"
