"""The learner's files: complete or missing, checked when they are read, and pruned."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.fake_learner_broker import recorded
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import PreTrainedModel

from nouscoder.atomic_files import StorageError, numbered, whole_folder, write_whole
from nouscoder.config import Config, LearnerSection
from nouscoder.domain.batch import Batch
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import Unusable
from nouscoder.learner.model.synthetic import random_batch, random_policy, write_policy_folder
from nouscoder.learner.model.weights import load_model, put_weights, weights_of
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.learner.state.batch_settings import BatchSettings
from nouscoder.learner.state.checkpoint_store import Checkpoint, CheckpointError, CheckpointStore, Progress, restore
from nouscoder.learner.state.run_log import BatchLines, BatchSeconds, RunLog, metrics_lines, reward_line, sample_lines
from nouscoder.learner.state.saved_batches import SavedBatchError, SavedBatches
from nouscoder.learner.trainer import Trainer
from nouscoder.objectives.dapo import Dapo
from nouscoder.policy_folder.policy_tensors import PolicyTensors
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.policy_folder.weights_files import WeightsMissing, shards_of, weights_files


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained_trainer(seed: int = 0) -> Trainer:
    trainer = Trainer(random_policy(seed), Config(learner=LearnerSection(steps_per_batch=2, learning_rate=1e-2)))
    trainer.train_batch(random_batch(0, seed=1))
    return trainer


def publish(publisher: PolicyPublisher, model: PreTrainedModel, policy_version: int, step: int) -> PolicyManifest:
    return publisher.write(StagedPolicy.of(model, policy_version, step))


def save(store: CheckpointStore, trainer: Trainer, progress: Progress) -> Checkpoint:
    checkpoint = store.begin(trainer, progress).finish()
    store.prune()
    return checkpoint


def disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- files ----


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "00000001"
    stack = ExitStack()
    part = stack.enter_context(whole_folder(final))
    (part / "a").write_text("a")
    assert not final.exists()
    assert not stack.__exit__(RuntimeError, RuntimeError("half way"), None)
    assert list(tmp_path.iterdir()) == []
    with whole_folder(final) as part:
        (part / "a").write_text("a")
    assert (final / "a").read_text() == "a"


def test_a_full_disk_is_one_sentence_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(StorageError, match=r"^the disk is full: .*/file was not written; free some space"):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- checkpoints ----


def test_a_checkpoint_restores_weights_optimizer_and_random_state_bit_for_bit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    trainer = trained_trainer()
    save(store, trainer, Progress(2, 0))
    random_state = torch.get_rng_state()
    expected = [step.loss for step in trainer.train_batch(random_batch(1, seed=1)).steps]

    torch.rand(3)
    checkpoint = store.newest()
    assert checkpoint is not None
    assert checkpoint.progress == Progress(2, 0)
    fresh = Trainer(random_policy(99), Config(learner=LearnerSection(steps_per_batch=2, learning_rate=1e-2)))
    restore(fresh, checkpoint)
    assert fresh.step == 2
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [step.loss for step in fresh.train_batch(random_batch(1, seed=1)).steps] == expected
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(fresh.model.state_dict()[name], tensor)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    trainer = trained_trainer()
    for step in (2, 4):
        save(CheckpointStore(folder, keep=3), trainer, Progress(step, step // 2 - 1))
    return folder


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_skipped_with_a_log_line_and_the_previous_one_is_used(
    two_checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    store = CheckpointStore(tmp_path, keep=3)
    victim = tmp_path / "00000004" / file
    data = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        # In the manifest, change the first digit of a checksum.
        at = data.index(b': "', 12) + 3 if file == "manifest.json" else len(data) // 2
        victim.write_bytes(data[:at] if damage == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    newest = store.newest()
    assert newest is not None
    assert newest.progress.step == 2
    assert [record.getMessage() for record in caplog.records] == ["skipping a damaged checkpoint"]
    with pytest.raises(CheckpointError, match="00000004"):
        store.at_step(4)


def test_the_newest_checkpoints_are_kept_and_incomplete_ones_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "00000009.part").mkdir()
    trainer = trained_trainer()
    for step in (2, 4, 6):
        save(store, trainer, Progress(step, step // 2 - 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000004", "00000006"]


def test_a_full_disk_while_checkpointing_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    trainer = trained_trainer()
    save(store, trainer, Progress(2, 0))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", disk_full)
        with pytest.raises(StorageError, match=r"the disk is full: .*/00000004"):
            save(store, trainer, Progress(4, 1))
    newest = store.newest()
    assert newest is not None
    assert newest.progress.step == 2
    assert list(numbered(tmp_path)) == [2]


def test_safetensors_error_about_a_full_disk_gives_the_same_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:  # its message on a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("nouscoder.learner.publication.publisher.save_file", full)
    with pytest.raises(StorageError, match=r"the disk is full: .*/00000002 was not written"):
        publish(PolicyPublisher(tmp_path, keep=2), random_policy(0), 2, 2)
    assert list(tmp_path.iterdir()) == []


def test_dcps_error_about_a_full_disk_gives_the_same_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nouscoder.learner.state.checkpoint_store.FileSystemWriter.write_data", disk_full)
    pending = CheckpointStore(tmp_path, keep=1).begin(trained_trainer(), Progress(2, 0))
    with pytest.raises(StorageError, match=r"the disk is full: .*/00000002 was not written"):
        pending.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_holds_the_state_at_its_beginning_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP writes after two more batches have been trained, and the checkpoint has the state before them."""
    trained_on = threading.Event()
    written = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        assert trained_on.wait(60)
        return written(*arguments)

    monkeypatch.setattr("nouscoder.learner.state.checkpoint_store.FileSystemWriter.write_data", late)
    store, trainer = CheckpointStore(tmp_path, keep=2), trained_trainer()
    expected = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    pending = store.begin(trainer, Progress(2, 0))
    losses = [step.loss for number in (1, 2) for step in trainer.train_batch(random_batch(number, seed=1)).steps]
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in trainer.model.state_dict().items())
    trained_on.set()
    fresh = Trainer(random_policy(99), Config(learner=LearnerSection(steps_per_batch=2, learning_rate=1e-2)))
    restore(fresh, pending.finish())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fresh.model.state_dict().items())
    again = [step.loss for number in (1, 2) for step in fresh.train_batch(random_batch(number, seed=1)).steps]
    assert again == losses, "the optimizer's state must also be that of the beginning"


def test_there_is_no_checkpoint_in_an_empty_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "never", keep=1)
    assert store.newest() is None
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        store.at_step(3)


# ---- weights and policies ----


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_published_policy(tmp_path: Path, tied: bool) -> None:
    model = random_policy(0, tied=tied)
    write_policy_folder(tmp_path / "policy", random_policy(1, tied=tied))
    manifest = publish(PolicyPublisher(tmp_path / "policies", keep=2), model, 3, 12)
    (shard,) = manifest.shards
    file = Path(manifest.folder) / shard.name
    assert file == tmp_path / "policies" / "00000003" / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == shard.sha256
    assert (manifest.policy_version, manifest.step, manifest.num_bytes) == (3, 12, file.stat().st_size)
    assert file.stat().st_mode & 0o044 == 0o044, "generation may run as another user"
    file.replace(tmp_path / "policy" / "model.safetensors")
    loaded = load_model(tmp_path / "policy")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_policy_larger_than_a_shard_is_split_and_loads_in_transformers_and_the_engine(tmp_path: Path) -> None:
    model = random_policy(0)
    largest = max(tensor.nbytes for tensor in weights_of(model).values())
    publisher = PolicyPublisher(tmp_path / "policies", keep=2, shard_bytes=largest)
    manifest = publish(publisher, model, 0, 0)
    folder = Path(manifest.folder)
    files = weights_files(folder)
    assert [file.name for file in files] == [shard.name for shard in manifest.shards]
    assert len(files) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= largest for file in files)
    assert shards_of(folder) == manifest.shards
    assert publish(publisher, model, 0, 0) == manifest, "the same weights again give the same manifest"
    write_policy_folder(tmp_path / "config", random_policy(1))
    (folder / "config.json").write_bytes((tmp_path / "config/config.json").read_bytes())
    from_engine = dict(PolicyTensors(files).read())
    from_transformers = weights_of(load_model(folder))
    for name, tensor in weights_of(model).items():
        assert torch.equal(from_transformers[name], tensor), name
        assert torch.equal(from_engine[name], tensor), name


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"weight_map": {}}', "must name files of its own folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "must name files of its own folder"),
        ('{"weight_map": {"a": 3}}', "must name files of its own folder"),
        ('{"weight_map": {"a": "x.safetensors"}}', r"x\.safetensors cannot be read"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(tmp_path: Path, index: str, says: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsMissing, match=rf"{tmp_path}.*{says}"):
        shards_of(tmp_path)


def test_publishing_the_same_weights_again_does_not_change_the_file(tmp_path: Path) -> None:
    publisher = PolicyPublisher(tmp_path, keep=2)
    first = publish(publisher, random_policy(0), 0, 0)
    (file,) = weights_files(Path(first.folder))
    inode = file.stat().st_ino
    assert publish(publisher, random_policy(0), 0, 0) == first
    assert file.stat().st_ino == inode
    assert publish(publisher, random_policy(1), 0, 0).digest != first.digest, "another policy replaces it"


def test_the_newest_policies_are_kept(tmp_path: Path) -> None:
    publisher = PolicyPublisher(tmp_path, keep=3)
    for version in range(5):
        publish(publisher, random_policy(0), version, version)
    assert list(numbered(tmp_path)) == [2, 3, 4]


def stored_in(manifest: PolicyManifest) -> tuple[dict[str, torch.Tensor], Path]:
    """The tensors of a version of one file, and the file."""
    file = Path(manifest.folder) / "model.safetensors"
    return load_file(file), file


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    manifest = publish(PolicyPublisher(tmp_path, keep=2), random_policy(0, num_layers=1), 0, 0)
    with pytest.raises(Unusable, match=r"another model: model\.layers\.1"):
        put_weights(random_policy(0), *stored_in(manifest))
    narrow = publish(PolicyPublisher(tmp_path, keep=2), random_policy(0, hidden_size=16), 1, 0)
    with pytest.raises(Unusable, match="another model"):
        put_weights(random_policy(0), *stored_in(narrow))
    with pytest.raises(Unusable, match="nothing is not a folder, so it holds no policy"):
        load_model(tmp_path / "nothing")


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    manifest = publish(PolicyPublisher(tmp_path, keep=2), random_policy(0, tied=True), 0, 0)
    assert "lm_head.weight" not in load_file(Path(manifest.folder) / "model.safetensors")
    assert "lm_head.weight" in weights_of(random_policy(0))
    other = random_policy(1, tied=True)
    put_weights(other, *stored_in(manifest))
    assert torch.equal(other.lm_head.weight, random_policy(0, tied=True).lm_head.weight)


# ---- batches ----


async def save_batch(saved: SavedBatches, batch: Batch, *, piece_bytes: int = 1000, without_last: bool = False) -> None:
    """Save a batch like the learner, with its records in pieces that do not end at the ends of records."""
    leased, records = recorded(batch)
    data = b"".join(records.values())

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data) - int(without_last), piece_bytes):
            yield data[: len(data) - int(without_last)][start : start + piece_bytes]

    await saved.save(leased, pieces())


async def test_saved_batches_load_equal_and_are_kept_until_checkpoints_include_them(tmp_path: Path) -> None:
    saved = SavedBatches(tmp_path, keep=2)
    batches = [random_batch(b, seed=1, policy_version=b) for b in range(5)]
    for batch in batches:
        await save_batch(saved, batch)
    assert saved.load(1) == batches[1]
    assert saved.load(3) == batches[3]
    for last_unneeded, left in ((-1, [0, 1, 2, 3, 4]), (1, [2, 3, 4]), (4, [3, 4])):
        saved.prune(last_unneeded)
        assert saved.numbers() == left
    with pytest.raises(SavedBatchError, match=r"00000000\.batch cannot be read"):
        saved.load(0)
    whole = (tmp_path / "00000003.batch").read_bytes()
    for broken in (b"\x0a\xff", whole[:-8], whole + bytes(8), whole[:-100] + b"!" + whole[-99:]):
        (tmp_path / "00000003.batch").write_bytes(broken)
        with pytest.raises(SavedBatchError, match=r"00000003\.batch is not a saved batch"):
            saved.load(3)


async def test_the_batches_before_one_are_those_that_there_are(tmp_path: Path) -> None:
    saved = SavedBatches(tmp_path, keep=2)
    batches = [random_batch(b, seed=1, policy_version=b) for b in range(3)]
    for batch in batches:
        await save_batch(saved, batch)
    assert saved.before(0, 2) == []
    assert saved.before(2, 1) == batches[1:2]
    assert saved.before(2, 5) == batches[:2]
    saved.prune(0)
    with pytest.raises(SavedBatchError, match=r"00000000\.batch cannot be read"):
        saved.before(2, 2)


async def test_a_batch_with_missing_records_is_not_saved(tmp_path: Path) -> None:
    saved = SavedBatches(tmp_path, keep=2)
    with pytest.raises(SavedBatchError, match="bytes of records, not"):
        await save_batch(saved, random_batch(0, seed=1), without_last=True)
    assert list(tmp_path.iterdir()) == []


def test_the_settings_of_a_batch_are_those_of_the_first_time(tmp_path: Path) -> None:
    kept, first = BatchSettings(tmp_path), LearnerSection(learning_rate=1e-3, threads=1)
    assert kept.kept(4, first) is None
    assert kept.fix(4, first) == first
    changed = LearnerSection(learning_rate=5e-3, objective=Dapo(clip_high=0.4), threads=7)
    again = kept.fix(4, changed)
    assert (again.learning_rate, again.objective, again.threads) == (1e-3, Dapo(), 7)
    assert kept.fix(5, changed) == changed
    kept.prune(5)
    assert (kept.kept(4, first), kept.kept(5, changed)) == (None, changed)
    (tmp_path / "00000005.json").write_text('{"learning_rate": -1}')
    with pytest.raises(SavedBatchError, match=r"00000005\.json does not hold the settings of a batch"):
        kept.fix(5, first)


# ---- the log ----


def steps_in(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def lines(*steps: int) -> BatchLines:
    samples = [{"step": steps[-1], "rollout_id": str(n), "program": f"print({n})"} for n in range(3)]
    rewards = [{"step": steps[-1], "batch_id": steps[-1] // 2 - 1, "rewards": {"p": [1.0, -1.0]}}]
    return BatchLines([{"step": step, "loss": step / 8} for step in steps], samples, rewards)


def test_each_line_is_written_once_in_order_after_an_interruption_at_any_byte(tmp_path: Path) -> None:
    """The files end at any byte and the batch is trained again: they equal those of an uninterrupted run."""
    log = RunLog(tmp_path)
    for steps in ((1, 2), (3, 4)):
        log.append(lines(*steps))
    whole = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "rewards.jsonl")}
    for name, data in whole.items():
        for cut in range(0, len(data), 7):
            (tmp_path / name).write_bytes(data[:cut])
            log = RunLog(tmp_path)
            log.open(last_step=4)
            for steps in ((1, 2), (3, 4), (3, 4)):
                log.append(lines(*steps))
            assert (tmp_path / name).read_bytes() == data


def test_lines_after_the_last_replayable_step_are_removed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for steps in ((1, 2), (3, 4)):
        log.append(lines(*steps))
    log.open(last_step=2)
    assert (steps_in(tmp_path / "metrics.jsonl"), steps_in(tmp_path / "samples.jsonl")) == ([1, 2], [2, 2, 2])
    log.append(lines(3, 4))
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_lines_of_a_batch(tmp_path: Path) -> None:
    write_policy_folder(tmp_path, random_policy(0))
    trainer = Trainer(random_policy(0), Config(learner=LearnerSection(steps_per_batch=2)))
    batch = random_batch(3, seed=1, policy_version=3)
    trained = trainer.train_batch(batch)
    made = BatchLines(
        metrics_lines(trained, 4, BatchSeconds(wait_for_batch=1.5, checkpoint=0.25, publish=0.5)),
        sample_lines(trained, load_tokenizer(tmp_path).decode, count=5, seed=0),
        [reward_line(trained)],
    )
    (rewards,) = made.rewards
    assert (rewards["step"], rewards["batch_id"], len(rewards["rewards"])) == (2, 3, 4)
    assert sorted(value for values in rewards["rewards"].values() for value in values) == sorted(
        scored.graded.reward for scored in trained.scored
    )
    first, last = made.metrics
    assert {
        "step", "batch_id", "policy_version", "loss", "reward_mean", "pass_rate", "staleness_mean", "staleness_max",
        "entropy", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "ratio_min", "ratio_max",
        "effective_sample_size", "gradient_norm", "learning_rate", "tokens", "tokens_per_second",
        "response_length_correct", "response_length_incorrect", "seconds", "time",
    } <= set(first)  # fmt: skip
    assert (first["step"], last["step"], last["policy_version"], last["batch_id"]) == (1, 2, 4, 3)
    assert (first["seconds"]["wait_for_batch"], last["seconds"]["wait_for_batch"]) == (1.5, 0.0)
    assert (first["seconds"]["checkpoint"], first["seconds"]["publish"], last["seconds"]["publish"]) == (0.25, 0.5, 0.0)
    assert first["seconds"]["train"] + last["seconds"]["train"] == pytest.approx(trained.duration_s)
    assert first["tokens"] + last["tokens"] == sum(g.rollout.num_sampled_tokens for g in batch.rollouts)

    assert len({line["rollout_id"] for line in made.samples}) == 5
    by_id = {graded.rollout.rollout_id: graded for graded in batch.rollouts}
    for line in made.samples:
        graded = by_id[line["rollout_id"]]
        assert line["step"] == 2
        assert line["verdict"] == graded.verdict.kind.value
        assert line["version_range"] in ([2, 3], [3, 3])
        assert line["prompt"] == load_tokenizer(tmp_path).decode(graded.rollout.prompt_token_ids)
        assert line["program"] == graded.rollout.text
    assert sample_lines(trained, load_tokenizer(tmp_path).decode, 5, 0) == made.samples, "the same after a replay"
    assert len(sample_lines(replace(trained, scored=trained.scored[:2]), load_tokenizer(tmp_path).decode, 5, 0)) == 2
