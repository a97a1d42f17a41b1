"""Ranks that train together have the gradients of one process, and a lost rank ends the group with a sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore

from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.parallel.balance import Cost, rounds
from nouscoder.learner.parallel.rank_messages import Leader, Listener, RankMessage, RankMessageKind
from nouscoder.learner.parallel.ranks import RankLost, Ranks
from nouscoder.learner.parallel.rendezvous import NobodyCame, meet
from nouscoder.policy_folder.delta import write_delta

SCRIPT = Path(__file__).with_name("learner_rank.py")


class Start(Protocol):
    """Runs a learner of several ranks; see learner_rank.py."""

    def __call__(self, what: str, folder: Path, size: int) -> list[int]:
        """The exit codes of the ranks."""
        ...


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:

        def ask(what: str, folder: Path, size: int) -> list[int]:
            assert parent.stdin is not None
            assert parent.stdout is not None
            print(json.dumps([what, str(folder), size]), file=parent.stdin, flush=True)
            codes: list[int] = json.loads(parent.stdout.readline())
            return codes

        yield ask


def log_of(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.log").read_text()


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)) for name in other)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200), st.integers(2, 5))
def test_rounds_have_every_rollout_once_within_the_budget(lengths: list[int], budget: int, num_ranks: int) -> None:
    of_rounds = rounds(lengths, budget, num_ranks, Cost(0.1))
    assert all(len(rows) == num_ranks for rows in of_rounds)
    rows = [row for rows in of_rounds for row in rows]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) <= 1 or sum(lengths[index] for index in row) <= budget for row in rows)


def test_ranks_have_about_equal_work_in_each_round() -> None:
    cost = Cost(1e-3)
    lengths = [100 + 37 * index % 900 for index in range(200)]
    for rows in rounds(lengths, 4000, 4, cost):
        work = [sum(cost.of_length(lengths[index]) for index in row) for row in rows]
        assert max(work) < 1.1 * min(work)


def test_a_rank_gets_each_command_once_and_in_order_and_rank_0_waits_until_it_has_left() -> None:
    store = HashStore()
    leader = Leader(Ranks(0, 2, store, patience_s=600.0))
    listener = Listener(Ranks(1, 2, store, patience_s=600.0), store)
    told = [
        RankMessage(RankMessageKind.LOAD, 4),
        RankMessage(RankMessageKind.TRAIN, 2),
        RankMessage(RankMessageKind.SAVE, folder="there"),
    ]
    for command in told:
        leader.tell(command)
    assert [listener.next() for _ in told] == told
    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(leader.close)
        assert listener.next() == RankMessage(RankMessageKind.STOP)
        assert not closed.done()
        listener.leave()
        closed.result()


def test_a_rank_that_no_longer_counts_is_lost_for_those_that_wait() -> None:
    store = HashStore()
    with pytest.raises(RankLost, match="rank 0 of the learner has not answered for 0 s"):
        Listener(Ranks(1, 2, store, patience_s=0.1), store).next()
    leader = Leader(Ranks(0, 2, store, patience_s=0.1))
    with (
        pytest.raises(RankLost, match="rank 1 of the learner has not answered"),
        leader.together(RankMessage(RankMessageKind.LOAD)),
    ):
        wait_until_lost(leader)
    leader.close()


def test_ranks_meet_in_a_store_that_an_earlier_start_of_the_group_has_used() -> None:
    store = HashStore()
    parts: set[bytes] = set()
    for start in range(3):
        with ThreadPoolExecutor(3) as threads:
            met = [*threads.map(lambda rank: meet(store, rank, 3, 120.0), range(3))]
        assert not any(part.check(["command/0"]) for part in met), "a command of an earlier start"
        met[0].set("command/0", f"of start {start}")
        parts |= {part.get("command/0") for part in met}
    assert parts == {b"of start 0", b"of start 1", b"of start 2"}


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(NobodyCame, match="rank 1 of the learner did not come"):
        meet(HashStore(), 0, 3, 0.1)
    with pytest.raises(NobodyCame, match="rank 0 of the learner did not come"):
        meet(HashStore(), 2, 3, 0.1)


def wait_until_lost(leader: Leader) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        leader.check()
        time.sleep(0.01)


@pytest.mark.soak
def test_ranks_have_the_gradients_and_figures_of_one_process(start: Start, tmp_path: Path) -> None:
    for size in (1, 2, 4):
        assert start("gradient", tmp_path, size) == [0] * size, log_of(tmp_path, 0)
    alone, two, four = (torch.load(tmp_path / f"gradient{size}.pt") for size in (1, 2, 4))
    assert difference(two, alone) < 1e-5
    assert difference(four, alone) < 1e-5


@pytest.mark.soak
def test_ranks_with_experts_have_the_gradients_of_one_process(start: Start, tmp_path: Path) -> None:
    for size in (1, 2):
        assert start("gradient-experts", tmp_path, size) == [0] * size, log_of(tmp_path, 0)
    alone, two = (torch.load(tmp_path / f"gradient-experts{size}.pt") for size in (1, 2))
    assert difference(two, alone) < 1e-5


@pytest.mark.soak
def test_ranks_have_the_gradients_of_one_process_where_each_row_has_one_sequence(start: Start, tmp_path: Path) -> None:
    for size in (1, 2):
        assert start("gradient-stablelm", tmp_path, size) == [0] * size, log_of(tmp_path, 0)
    alone, two = (torch.load(tmp_path / f"gradient-stablelm{size}.pt") for size in (1, 2))
    assert difference(alone, two) < 1e-4


@pytest.mark.soak
def test_such_a_policy_is_refused_where_ranks_share_rows(start: Start, tmp_path: Path) -> None:
    assert start("gradient-stablelm-context", tmp_path, 2) == [1, 1]
    for rank in (0, 1):
        assert "Unusable: a model of type stablelm cannot be trained with learner.context_parallel" in log_of(
            tmp_path, rank
        )


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["gradient", "gradient-experts"])
def test_ranks_that_share_rows_have_the_gradients_and_figures_of_one_process(
    policy: str, start: Start, tmp_path: Path
) -> None:
    """Two ranks share all rows; of four, two share the rows of one half and two those of the other."""
    assert start(policy, tmp_path, 1) == [0], log_of(tmp_path, 0)
    alone = torch.load(tmp_path / f"{policy}1.pt")
    for size in (2, 4):
        assert start(f"{policy}-context", tmp_path, size) == [0] * size, log_of(tmp_path, 0)
        assert difference(torch.load(tmp_path / f"{policy}-context{size}.pt"), alone) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "bound"), [("lora", 1e-5), ("bf16", 0.03)])
def test_ranks_have_the_gradients_of_one_process_in_each_form(
    start: Start, tmp_path: Path, kind: str, bound: float
) -> None:
    for size in (1, 2):
        assert start(f"gradient-{kind}", tmp_path, size) == [0] * size, log_of(tmp_path, 0)
    alone, two = (torch.load(tmp_path / f"gradient-{kind}{size}.pt") for size in (1, 2))
    weights = {name for name in alone if name.endswith(("weight", "lora_a", "lora_b"))}
    assert difference({name: two[name] for name in weights}, {name: alone[name] for name in weights}) < bound
    assert {two[name].dtype for name in weights} == {torch.float32}


def run_folder(root: Path) -> Path:
    root.mkdir()
    write_policy_folder(root / "run" / "policy", random_policy(0))
    return root


def final_policy(root: Path) -> dict[str, torch.Tensor]:
    (file,) = (root / "run" / "policies" / "00000004").glob("*.safetensors")
    return load_file(file)


@pytest.mark.soak
@pytest.mark.parametrize("device", ["", "-cuda"])
@pytest.mark.parametrize(
    ("kind", "bound"), [("", 1e-5), ("-8bit", 3e-3), ("-cpu", 1e-5), ("-bf16", 3e-3), ("-lora", 1e-5)]
)
def test_one_rank_that_fsdp2_wraps_is_killed_and_resumed_as_one_that_it_does_not(
    start: Start, tmp_path: Path, kind: str, bound: float, device: str
) -> None:
    """With the optimizer's states in each form."""
    if device and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch finds none")
    bound = max(bound, 1e-3) if device else bound  # kernels of a GPU add in another order
    plain, wrapped = run_folder(tmp_path / "plain"), run_folder(tmp_path / "wrapped")
    assert start(f"run{device}{kind}", plain, 1) == [0], log_of(plain, 0)
    assert start(f"die0-group{device}{kind}", wrapped, 1) == [-9], log_of(wrapped, 0)
    assert [*(wrapped / "run" / "checkpoints").glob("0000000[24]")], "a checkpoint of it is there"
    assert start(f"run-group{device}{kind}", wrapped, 1) == [0], log_of(wrapped, 0)
    assert (wrapped / "wrapped.txt").read_text() == "True"
    assert (plain / "wrapped.txt").read_text() == "False"
    assert difference(final_policy(wrapped), final_policy(plain)) < bound


@pytest.mark.soak
def test_two_ranks_publish_the_files_and_deltas_of_one_that_gathers(start: Start, tmp_path: Path) -> None:
    """The first version is gathered, the others are written by all ranks."""
    gathered, by_ranks = run_folder(tmp_path / "gathered"), run_folder(tmp_path / "by_ranks")
    assert start("run", gathered, 2) == [0, 0], log_of(gathered, 0)
    assert start("run-deltas", by_ranks, 2) == [0, 0], log_of(by_ranks, 0)
    noted = [(root / "run" / "publications").read_text().splitlines() for root in (by_ranks, gathered)]
    assert noted == [["gathered", *["by ranks"] * (len(noted[1]) - 1)], ["gathered"] * len(noted[1])]
    kept = sorted(folder.name for folder in (by_ranks / "run" / "policies").iterdir())
    assert len(kept) > 2
    for before, version in pairwise(kept):
        (file,), (same,) = (
            (root / "run" / "policies" / version).glob("*.safetensors") for root in (by_ranks, gathered)
        )
        assert file.read_bytes() == same.read_bytes()
        write_delta(by_ranks / "run" / "policies" / before / file.name, file, tmp_path / "delta")
        assert sorted(found.suffix for found in file.parent.iterdir()) == [".delta", ".safetensors"]
        assert file.with_suffix(".delta").read_bytes() == (tmp_path / "delta").read_bytes()


@pytest.mark.soak
def test_a_lost_rank_ends_the_group_and_any_number_of_ranks_resumes(start: Start, tmp_path: Path) -> None:
    plain, killed = run_folder(tmp_path / "plain"), run_folder(tmp_path / "killed")
    assert start("run", plain, 1) == [0], log_of(plain, 0)
    assert start("die", killed, 2) == [1, -9], log_of(killed, 0)
    sentence = log_of(killed, 0).splitlines()[-1]
    assert sentence.startswith("RankLost: another rank of the learner died or did not answer"), sentence
    assert [*(killed / "run" / "checkpoints").glob("0000000[24]")], "a checkpoint of two ranks is there"
    assert start("run", killed, 3) == [0, 0, 0], log_of(killed, 0)
    assert difference(final_policy(killed), final_policy(plain)) < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "bound"), [("lora", 1e-5), ("adapter", 1e-3), ("8bit", 3e-3), ("bf16", 3e-3)])
def test_two_ranks_are_resumed_by_three_with_the_states_of_each_form(
    start: Start, tmp_path: Path, kind: str, bound: float
) -> None:
    plain, killed = run_folder(tmp_path / "plain"), run_folder(tmp_path / "killed")
    assert start(f"run-{kind}", plain, 1) == [0], log_of(plain, 0)
    assert start(f"die-{kind}", killed, 2) == [1, -9], log_of(killed, 0)
    assert start(f"run-{kind}", killed, 3) == [0, 0, 0], log_of(killed, 0)
    assert difference(final_policy(killed), final_policy(plain)) < bound


@pytest.mark.soak
def test_a_run_begins_with_the_checkpoint_of_another_number_of_ranks(start: Start, tmp_path: Path) -> None:
    before = run_folder(tmp_path / "before")
    assert start("run", before, 3) == [0, 0, 0], log_of(before, 0)
    after = {size: tmp_path / f"after{size}" for size in (1, 2)}
    for size, folder in after.items():
        policy = random_policy(0)
        policy.load_state_dict(final_policy(before), strict=False)
        write_policy_folder(folder / "run" / "policy", policy)
        shutil.copytree(before / "run" / "checkpoints" / "00000008", folder / "first.checkpoint")
        assert start("run", folder, size) == [0] * size, log_of(folder, 0)
    assert difference(final_policy(after[2]), final_policy(after[1])) < 1e-5
    assert difference(final_policy(after[1]), final_policy(before)) > 1e-5


@pytest.mark.soak
def test_the_other_ranks_end_when_rank_0_is_killed(start: Start, tmp_path: Path) -> None:
    root = run_folder(tmp_path / "run0")
    assert start("die0", root, 2) == [-9, 1], log_of(root, 1)
    assert log_of(root, 1).splitlines()[-1].startswith("RankLost: "), log_of(root, 1)


def torchrun(what: str, root: Path) -> int:
    """The exit code of a group of two ranks that torchrun starts, and starts again when one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    with (root / "torchrun.log").open("w") as output:
        return subprocess.run([*command, SCRIPT, what, root], stdout=output, stderr=output, timeout=900).returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing disturbed."""
    root = run_folder(tmp_path_factory.mktemp("torchrun") / "plain")
    assert torchrun("run", root) == 0, log_of(root, 0)
    return root


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", ["die", "die0", "hang"])
def test_a_group_that_torchrun_starts_again_ends_as_an_undisturbed_one_bit_for_bit(
    what: str, undisturbed: Path, tmp_path: Path
) -> None:
    root = run_folder(tmp_path / what)
    assert torchrun(what, root) == 0, log_of(root, 0)
    assert (root / "run" / "struck").exists()
    expected, found = final_policy(undisturbed), final_policy(root)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    commits, policies, finished = pickle.loads((root / "run" / "broker").read_bytes())
    assert commits == [(batch, 2 * batch + 2) for batch in range(4)]
    assert [manifest.policy_version for manifest in policies] == [0, 1, 2, 3, 4]
    assert finished
