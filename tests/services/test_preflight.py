"""A wrong configuration gets its sentences before any process starts and before the run folder is made."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command_line import nouscoder
from tests.redis_process import RedisProcess
from typer.testing import CliRunner

from nouscoder.broker.redis_server import find_redis_binary
from nouscoder.cli.app import app
from nouscoder.config import devices, load_config
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem, is_held_out
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.policy_folder import engine_choice, inspection
from nouscoder.policy_folder.engine_types import VLLM, VLLM_VERSION
from nouscoder.run import preflight
from nouscoder.run.held_out import leak_lines
from nouscoder.run.supervisor import Supervisor
from nouscoder.run.users_code import users_code_faults

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4


class Home:
    """A user's folder: a model, two problem files and my.toml."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"
        self.model.mkdir(parents=True)
        self.write("model/config.json", '{"model_type": "qwen3", "eos_token_id": 1, "max_position_embeddings": 4096}')
        self.write("model/tokenizer.json", "{}")
        (self.model / "model.safetensors").write_bytes(WEIGHTS)
        for name in ("train", "held_out"):
            tests = StdinTests((StdinCase("1", "2"),))
            save_problems(root / f"{name}.jsonl", [Problem(f"{name}-{n}", "Add one.", tests) for n in range(40)])
        self.keys = {
            "problems.train": '"train.jsonl"',
            "problems.held_out": '"held_out.jsonl"',
            "policy.path": '"model"',
            "run.root": '"runs"',
        }

    def write(self, name: str, text: str) -> None:
        """A file below the root."""
        (self.root / name).write_text(text)

    def change_lines(self, name: str, number: int, text: str) -> None:
        """Replace one line, counted from 1."""
        lines = (self.root / name).read_text().splitlines()
        lines[number - 1] = text
        self.write(name, "\n".join(lines) + "\n")

    def toml(self) -> Path:
        """my.toml."""
        self.write("my.toml", "\n".join(f"{key} = {value}" for key, value in self.keys.items()) + "\n")
        return self.root / "my.toml"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A folder that is not the working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return Home(tmp_path / "home")


class Started(Exception):
    """The run got as far as its processes."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting the first service ends the test."""

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(Supervisor, "start", start)


def sentences(home: Home) -> list[str]:
    """What `nouscoder train my.toml` prints, one entry a line."""
    config = home.toml()
    before = {*home.root.rglob("*")}
    answer = nouscoder("train", config)
    assert answer.exit_code == 78, answer.output
    assert {*home.root.rglob("*")} == before
    assert not list(Path.cwd().iterdir())
    return answer.stderr.removeprefix("nouscoder: ").splitlines()


def test_a_right_configuration_with_relative_paths_starts_the_services(home: Home) -> None:
    answer = CliRunner().invoke(app, ["train", str(home.toml())])
    assert isinstance(answer.exception, Started)
    assert f'path = "{home.model}"' in (home.root / "runs" / "run" / "config.toml").read_text()


def key(name: str, value: str) -> Callable[[Home], object]:
    """Set one key of my.toml."""
    return lambda home: home.keys.update({name: value})


def gone(name: str) -> Callable[[Home], object]:
    """Remove one file."""
    return lambda home: (home.root / name).unlink()


def text(name: str, content: str) -> Callable[[Home], object]:
    """Replace one file."""
    return lambda home: home.write(name, content)


def line(content: str) -> Callable[[Home], object]:
    """Replace line 3 of the training problems."""
    return lambda home: home.change_lines("train.jsonl", 3, content)


WRONG: list[tuple[Callable[[Home], object], str]] = [
    (
        key("problems.train", '"trian.jsonl"'),
        r"^problems.train: .*trian.jsonl does not exist.*did you mean train",
    ),
    (key("problems.held_out", '"none.jsonl"'), r"^problems.held_out: .* does not exist.*problems.held_out_share"),
    (
        text("model/config.json", '{"model_type": "mamba", "eos_token_id": 1}'),
        r"^policy.path: .*/model: the torch engine does not run .* of type mamba: set generation.engine to \"vllm\"",
    ),
    (
        text("model/config.json", '{"model_type": "qwen2", "eos_token_id": 1, "layer_types": ["linear_attention"]}'),
        r"^policy.path: .*/model: the torch engine does not run .* with layers of type linear_attention: set",
    ),
    (
        text("model/config.json", '{"model_type": "mpt", "eos_token_id": 1}'),
        r"^policy.path: .*/model: .* of type mpt, and vLLM 0.32.0 does not list them: take another model",
    ),
    (
        text(
            "model/config.json",
            '{"model_type": "phi3", "eos_token_id": 1, "max_position_embeddings": 4096,'
            ' "original_max_position_embeddings": 256, "rope_scaling": {"type": "longrope"}}',
        ),
        r"^generation.max_tokens_total 512 is more than the 256 positions of .*/model$",
    ),
    (key("policy.path", '"modle"'), r"^policy.path: .*home/modle does not exist: did you mean model"),
    (key("policy.path", '"/no/such/model"'), r"^policy.path: /no/such/model does not exist$"),
    (key("problems.tran", '"train.jsonl"'), r"my.toml: unknown key problems.tran: did you mean problems.train\?"),
    (
        key("learning_rate", "1e-5"),
        r"my.toml: unknown key learning_rate: did you mean learner.learning_rate or sft.learning_rate\?",
    ),
    (key("broker.group_size", '"eight"'), r"my.toml: broker.group_size: must be a valid integer .*'eight'"),
    (key("broker.batch_size", "30"), r"my.toml: broker: batch_size 30 must be a multiple of group_size 8"),
    (
        key("broker.batch_size", "16"),
        r"^learner.steps_per_batch is 4, but a batch has 2 groups: each step needs a whole",
    ),
    (key("generation.sampling.top_p", "1.5"), r"generation.sampling.top_p: .*less than or equal to 1"),
    (key("generation.sampling.max_new_tokens", "512"), r"^generation.sampling.max_new_tokens 512 must be less than"),
    (key("generation.max_tokens_total", "8192"), r"^generation.max_tokens_total 8192 is more than the 4096 positions"),
    (key("evaluation.max_new_tokens", "512"), r"^evaluation.max_new_tokens 512 must be less than generation.max_tok"),
    (key("evaluation.max_tokens_total", "8192"), r"^evaluation.max_tokens_total 8192 is more than the 4096 positions"),
    (key("evaluation.problems", '"hard.jsonl"'), r"^evaluation.problems: .*home/hard.jsonl does not exist"),
    (key("evaluation.problems", '"model/config.json"'), r"^evaluation.problems: .*model/config.json, "),
    (key("generation.environment.prompt_as", '"messages"'), r"prompt_as is \"messages\", but .* has no chat template"),
    (key("generation.environment.prompt_as", '"chat"'), r"prompt_as: must be 'auto', 'text' or 'messages'"),
    (
        key("generation.environment.prompt_template", '"Solve."'),
        r"prompt_template: expected: text around \{prompt\}.*'Solve\.'",
    ),
    (key("verifier.tokens_file", '"tokens"'), r"^verifier.tokens_file: .*home/tokens does not exist"),
    (key("broker.redis_url", '"redis://127.0.0.1:1/0"'), r"^broker.redis_url: redis://127.0.0.1:1/0 cannot be used"),
    (key("broker.redis_url", '"127.0.0.1:6379"'), r"^broker.redis_url: .* cannot be used: .*scheme"),
    (key("problems.held_out_share", "1e-9"), r"^problems.held_out: .* holds out none of its problems"),
    (gone("model/config.json"), r"^policy.path: .*model has no config.json"),
    (gone("model/tokenizer.json"), r"^policy.path: .*model has no tokenizer"),
    (gone("model/model.safetensors"), r"^policy.path: .*model has no model.safetensors"),
    (text("model/model.safetensors", "torn"), r"^policy.path: .*model.safetensors is not a whole safetensors file"),
    (text("model/config.json", '{"model_type": "x"}'), r"^policy.path: .* has an end-of-sequence token"),
    (text("train.jsonl", ""), r"^problems.train: .*train.jsonl holds no problem"),
    (line("{"), r"^problems.train: .*train.jsonl, line 3: not JSON"),
    (line('{"problem_id": "a", "tests": {}}'), r"train.jsonl, line 3: prompt is missing; tests.type: is missing"),
    (
        line('{"problem_id": "a", "promt": ""}'),
        r"line 3: prompt is missing; .*promt: unknown field: did you mean p",
    ),
    (line('{"problem_id": "train-0", "prompt": "", "tests": {"type": "stdin", "cases": []}}'), r"tests.cases: "),
]


def test_a_redis_with_another_run_of_the_name_is_refused(home: Home, tmp_path: Path) -> None:
    with RedisProcess(find_redis_binary(), tmp_path / "redis") as server:
        home.keys["broker.redis_url"] = f'"{server.url}"'
        identity = json.dumps({"run_id": "0" * 32, "folder": "/elsewhere/run", "seed": 0, "group_size": 8})
        server.ask("HSET", "nouscoder:{run}:meta", "run_id", "0" * 32, "identity", identity)
        (said,) = sentences(home)
        assert "holds another run of the name run, in /elsewhere/run: give this run another run.name, or try" in said
        server.ask("RENAME", "nouscoder:{run}:meta", "nouscoder:{other}:meta")
        assert isinstance(CliRunner().invoke(app, ["train", str(home.toml())]).exception, Started)


@pytest.mark.parametrize(("spoil", "sentence"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_a_wrong_configuration_gets_one_sentence(home: Home, spoil: Callable[[Home], object], sentence: str) -> None:
    spoil(home)
    (said,) = sentences(home)
    assert re.search(sentence, said), said


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM is installed."""
    monkeypatch.setattr(engine_choice, "vllm_is_installed", lambda: True)


@pytest.mark.usefixtures("with_vllm")
def test_vllm_runs_what_the_torch_engine_does_not(home: Home) -> None:
    home.write("model/config.json", '{"model_type": "mamba", "eos_token_id": 1, "max_position_embeddings": 4096}')
    home.keys |= {"generation.engine": '"vllm"'}
    assert isinstance(CliRunner().invoke(app, ["train", str(home.toml())]).exception, Started)


def test_init_names_the_engine_that_runs_a_model_before_it_writes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.root)
    home.write("model/config.json", '{"model_type": "mamba", "eos_token_id": 1, "max_position_embeddings": 4096}')
    answer = CliRunner().invoke(app, ["init", "model", "train.jsonl"])
    assert re.search(
        r"/model: the torch engine does not run .* mamba: give --engine vllm, which does$", str(answer.exception)
    )
    assert not Path("my.toml").exists()
    assert CliRunner().invoke(app, ["init", "model", "train.jsonl", "--engine", "vllm"]).exit_code == 0
    assert 'engine = "vllm"\n' in Path("my.toml").read_text()


def test_an_evaluation_names_it_too_before_it_makes_a_folder(home: Home) -> None:
    home.write("model/config.json", '{"model_type": "mamba", "eos_token_id": 1, "max_position_embeddings": 4096}')
    answer = CliRunner().invoke(app, ["eval", str(home.root / "held_out.jsonl"), "--policy", str(home.model)])
    assert re.search(
        r"/model: the torch engine does not run .* mamba: give --set generation.engine=vllm,", str(answer.exception)
    )
    assert not list(Path.cwd().iterdir())


def test_init_finds_what_it_is_given_in_the_working_directory_too(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.root)
    (home.root / "runs").mkdir()
    assert nouscoder("init", "model", "train.jsonl", "--out", "runs/my.toml").exit_code == 0
    config = load_config(Path("runs/my.toml"))
    assert (config.policy.path, config.problems.train) == (home.model, home.root / "train.jsonl")
    assert "fetches it from a hub" in nouscoder("init", "Qwen/Qwen3-8B", "train.jsonl", "--out", "hub.toml").stdout


def test_an_engine_that_is_not_installed_leaves_no_folder(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "vllm_is_installed", lambda: False)
    home.keys["generation.engine"] = '"vllm"'
    assert sentences(home) == ['generation.engine is "vllm", and vLLM is not installed: see docs/operating.md']
    demo = nouscoder("demo", "--engine", "vllm", "--set", f"run.root={home.root / 'runs'}")
    assert (demo.exit_code, (home.root / "runs").exists()) == (78, False)
    of_policy = nouscoder(
        "eval", home.root / "held_out.jsonl", "--policy", home.model, "--set", "generation.engine=vllm"
    )
    assert "vLLM is not installed" in of_policy.stderr
    assert not list(Path.cwd().iterdir())


def test_a_curriculum_that_leaves_no_problem_leaves_no_folder(home: Home) -> None:
    lines = [{"problem_id": f"train-{number}", "passed": 8, "sampled": 8} for number in range(40)]
    home.write("rates.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    home.keys |= {"broker.curriculum.name": '"pass_rates"', "broker.curriculum.pass_rates": '"rates.jsonl"'}
    (said,) = sentences(home)
    assert said.startswith("broker.curriculum pass_rates leaves no problem of the problem file")


def test_the_version_of_vllm_that_is_named_is_the_pinned_one() -> None:
    assert f'vllm = ["vllm=={VLLM_VERSION}"]' in Path(__file__).parents[2].joinpath("pyproject.toml").read_text()


@pytest.mark.usefixtures("with_vllm")
def test_a_device_that_this_machine_has_not_is_refused_by_its_key(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the services started and one of them failed; `demo --real --gpu` also prepared the model first."""
    monkeypatch.setattr(devices, "DRIVERS", (home.root / "nvidiactl",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    home.keys |= {
        "generation.engine": '"vllm"',
        "generation.device": '"cuda:1"',
        "learner.device": '"cuda"',
        "generation.vllm.weight_transfer": '"nccl"',
    }
    learner, generation = sentences(home)
    assert learner.startswith('learner.device is "cuda", and this machine has no GPU that torch could use')
    assert generation.startswith('generation.device is "cuda:1", and this machine has no GPU')
    answer = CliRunner().invoke(app, ["demo", "--real", "--gpu"])
    assert "has no GPU" in str(answer.exception)
    assert not list(Path.cwd().iterdir())
    training = nouscoder("reward-model", "train", "model", "pairs.jsonl", "--device", "cuda")
    assert (training.exit_code, '--device is "cuda", and this machine' in training.stderr) == (78, True)
    home.write("nvidiactl", "")
    write_torch(home, monkeypatch, "None")
    learner, generation = sentences(home)
    assert learner == 'learner.device is "cuda", and the torch that is installed was built without CUDA: take "cpu"'
    library = home.root / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"as deploy/images/empty_cuda.py makes it")
    monkeypatch.setattr(devices, "_torch_folder", lambda: home.root / "torch")
    (home.root / "torch").mkdir()
    home.write("torch/version.py", "cuda: Optional[str] = '13.0'\n")
    learner, _ = sentences(home)
    assert "torch is installed for CPUs, without NVIDIA's libraries (make ACCELERATOR=cuda installs them)" in learner
    write_torch(home, monkeypatch, "'13.0'")
    library.unlink()
    assert isinstance(CliRunner().invoke(app, ["train", str(home.toml())]).exception, Started)


@pytest.fixture
def with_gpu(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have NVIDIA's driver."""
    home.write("nvidiactl", "")
    monkeypatch.setattr(devices, "DRIVERS", (home.root / "nvidiactl",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_torch(home, monkeypatch, "'13.0'")


def write_torch(home: Home, monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    """An installed torch that was built for this version of CUDA; "None" for none."""
    home.write("version.py", f"from typing import Optional\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    monkeypatch.setattr(devices, "_torch_folder", lambda: home.root)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(("device", "learner"), [("cuda", "cuda"), ("cuda:0", "cuda"), ("cuda:1", "cuda:1")])
@pytest.mark.usefixtures("with_vllm")
def test_vllm_leaves_the_learner_a_part_of_their_common_device(home: Home, device: str, learner: str) -> None:
    """With 0.9 of it vLLM does not start, or the learner finds no memory, minutes after the start of the run."""
    home.keys |= {
        "generation.engine": '"vllm"',
        "generation.device": f'"{device}"',
        "learner.device": f'"{learner}"',
        "generation.vllm.kv_cache_memory_bytes": "1000000000",  # vLLM wants its share to be free all the same
    }
    (said,) = sentences(home)
    assert re.search(
        rf"^generation.vllm.gpu_memory_utilization: vLLM would take 0.9 of {device}, .* set at most 0.5 \(docs", said
    )


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    "more",
    [
        {"generation.vllm.gpu_memory_utilization": "0.5"},
        {"learner.device": '"cuda:1"'},
        {"learner.device": '"cpu"'},
        {"generation.engine": '"torch"'},
    ],
)
@pytest.mark.usefixtures("with_vllm")
def test_vllm_may_take_half_of_a_common_device_or_all_of_its_own(home: Home, more: dict[str, str]) -> None:
    home.keys |= {"generation.engine": '"vllm"', "generation.device": '"cuda"', "learner.device": '"cuda"'} | more
    assert isinstance(CliRunner().invoke(app, ["train", str(home.toml())]).exception, Started)


def started_with(home: Home) -> tuple[dict[str, str], str]:
    """What config.toml records of the devices and the engine, and what was printed before the start."""
    answer = CliRunner().invoke(app, ["train", str(home.toml())])
    assert isinstance(answer.exception, Started), answer.output
    config = load_config(home.root / "runs" / "run" / "config.toml")
    shutil.rmtree(home.root / "runs")
    found = {"engine": config.generation.engine, "device": config.generation.device, "learner": config.learner.device}
    return found, " ".join(answer.output.split())


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_is_used_unless_the_configuration_says_otherwise(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, device was cpu and engine torch, also where a GPU was idle, and nothing said so."""
    everything = {"engine": "torch", "device": "cuda", "learner": "cuda"}
    found, printed = started_with(home)
    assert found == everything
    assert "generation.engine is torch: vLLM is not installed" in printed
    home.keys |= {"generation.device": '"cpu"', "learner.device": '"cpu"'}
    found, printed = started_with(home)
    assert found == {"engine": "torch", "device": "cpu", "learner": "cpu"}
    assert "this machine has a GPU, and learner.device and generation.device are cpu" in printed
    del home.keys["generation.device"], home.keys["learner.device"]
    write_torch(home, monkeypatch, "None")
    found, printed = started_with(home)
    assert found == {"engine": "torch", "device": "cpu", "learner": "cpu"}
    assert "this machine has a GPU, and the torch that is installed was built without CUDA" in printed


@pytest.mark.usefixtures("with_gpu", "with_vllm")
def test_vllm_samples_where_it_can(home: Home) -> None:
    found, printed = started_with(home)
    assert found["engine"] == "torch"
    assert "vLLM would take 0.9 of cuda, and the learner needs it too" in printed
    home.keys["learner.device"] = '"cuda:1"'
    assert started_with(home)[0] == {"engine": "vllm", "device": "cuda", "learner": "cuda:1"}
    for name, value, why in (
        ("generation.sampling.top_p", "0.9", "generation.sampling.top_p must be 1"),
        ("generation.sampling.stop", '["x"]', "generation.sampling.stop needs generation.engine torch"),
        ("policy.router_replay", "true", "policy.router_replay needs generation.engine torch"),
    ):
        home.keys[name] = value
        found, printed = started_with(home)
        assert found["engine"] == "torch"
        assert why in printed
        del home.keys[name]
    home.keys["generation.engine"] = '"torch"'
    assert started_with(home)[0]["engine"] == "torch"


def test_a_machine_without_a_gpu_computes_on_its_processor(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DRIVERS", ())
    found, printed = started_with(home)
    assert found == {"engine": "torch", "device": "cpu", "learner": "cpu"}
    assert "GPU" not in printed
    assert "generation.engine" not in printed


def test_all_faults_are_reported_together(home: Home) -> None:
    home.keys["verifier.tokens_file"] = '"tokens"'
    home.keys["problems.held_out"] = '"held.jsonl"'
    (home.model / "tokenizer.json").unlink()
    (home.model / "model.safetensors").unlink()
    home.change_lines("train.jsonl", 40, "{}")
    assert [said.split(":")[0] for said in sentences(home)] == [
        *("policy.path", "policy.path", "verifier.tokens_file", "problems.train", "problems.held_out")
    ]


def test_a_hub_id_is_downloaded_when_no_such_folder_exists(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str) -> Path:
        asked.append(hub_id)
        return home.model

    monkeypatch.setattr(preflight, "downloaded", download)
    home.keys["policy.path"] = '"Org/Model-1.5B"'
    answer = CliRunner().invoke(app, ["train", str(home.toml())])
    assert isinstance(answer.exception, Started)
    assert asked == ["Org/Model-1.5B"]
    assert f'path = "{home.model}"' in (home.root / "runs" / "run" / "config.toml").read_text()


def test_a_hub_that_cannot_be_reached_is_one_sentence(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert inspection.is_hub_id("Org/Model-1.5B")
    home.keys["policy.path"] = '"Org/Model-1.5B"'
    (said,) = sentences(home)
    assert said.startswith("policy.path: Org/Model-1.5B is no folder here, and a hub did not give it: no route")


def test_a_share_of_the_training_file_is_held_out_of_training(home: Home) -> None:
    del home.keys["problems.held_out"]
    home.keys["problems.held_out_share"] = "0.25"
    from nouscoder.config import load_config
    from nouscoder.data.problem_index import held_out_problems, open_index

    config = load_config(home.toml())
    names = {f"train-{n}" for n in range(40)}
    held_out = {problem.problem_id for problem in held_out_problems(config)}
    assert held_out == {name for name in names if is_held_out(name, 0.25)}
    assert set(open_index(config).problem_ids) == names - held_out
    assert 0 < len(held_out) < 20


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"learner.schedule.decay_steps": "30"}, "decay_steps is 30, but the run has 40 steps"),
        (
            {"learner.schedule.decay_steps": "30", "learner.schedule.floor": "0.5"},
            "rate is 5e-07 in the 10 steps after",
        ),
        ({"learner.schedule.decay_steps": "40"}, ""),
        ({"learner.schedule.decay_steps": "50"}, ""),
    ],
)
def test_a_decay_that_ends_before_the_run_is_said(home: Home, keys: dict[str, str], said: str) -> None:
    """Before, the last steps had the learning rate 0, and nothing said it."""
    home.keys |= {
        "learner.schedule.decay": '"cosine"',
        "run.total_batches": "10",
        "learner.learning_rate": "1e-6",
    } | keys
    lines = preflight.notes_of(load_config(home.toml(), ["learner.steps_per_batch=4"]))
    assert said in "".join(lines)
    assert any("decay_steps" in line for line in lines) is bool(said)


def test_evaluations_have_problems_of_their_own(home: Home) -> None:
    from nouscoder.config import load_config
    from nouscoder.data.problem_index import held_out_problems

    del home.keys["problems.held_out"]
    home.keys["evaluation.problems"] = '"own.jsonl"'
    lines = (home.root / "train.jsonl").read_text().splitlines()
    home.write("own.jsonl", "\n".join(lines[:3]) + "\n")
    answer = CliRunner().invoke(app, ["train", str(home.toml())])
    assert isinstance(answer.exception, Started), "problems.held_out is not needed"
    assert [one.problem_id for one in held_out_problems(load_config(home.toml()))] == ["train-0", "train-1", "train-2"]


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
def test_the_types_of_vllm_are_those_of_its_registry() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for model_type in VLLM:
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        assert known & {names} if isinstance(names, str) else known & set(names), model_type


def test_problems_that_cannot_be_graded_are_named_by_train_and_init_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    good = {"prompt": "Add.", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "2"}]}}
    bad = {
        "prompt": "Add.",
        "tests": {"type": "call", "entry_point": "add it", "cases": [{"args": [1], "expected": 2}]},
    }
    checker = {"type": "checker", "checker": {"language": "cobolt", "code": "x"}, "cases": [{"input": "1"}]}
    rows = [
        *({"problem_id": f"g{n}", **good} for n in range(6)),
        {"problem_id": "e", **bad},
        {"problem_id": "w", **good, "limits": {"wall_time_s": 1e9}},
        {"problem_id": "c", "prompt": "Add.", "tests": checker},
    ]
    home.write("half.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    sets = ["--set", 'problems.train="half.jsonl"', "--set", "problems.held_out_share=0.3"]
    runs = [("train", str(home.toml()), *sets), ("init", "--out", "own.toml", "model", "half.jsonl")]
    for arguments in runs:
        answer = nouscoder(*arguments)
        assert answer.exit_code == 78, answer.output
        assert "3 of 9 problems cannot be graded" in answer.output
        for fault in ("e: tests.entry_point", "w: limits.wall_time_s", "c: tests.checker.language"):
            assert fault in answer.output
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "own.toml").exists()


@pytest.mark.parametrize("key", ["problems.held_out", "evaluation.problems", "problems.held_out_share"])
def test_held_out_problems_that_are_training_problems_are_counted(tmp_path: Path, key: str) -> None:
    home = Home(tmp_path)
    tests = StdinTests((StdinCase("1", "2"),))
    train = [Problem(f"train-{n}", f"Add {n % 30}.", tests) for n in range(40)]  # ten are twice in it, by text
    train.append(Problem("named", "Add 31.", tests))
    save_problems(tmp_path / "train.jsonl", train)
    same_name, same_text = Problem("named", "Something else.", tests), Problem("own", "add  7.", tests)
    fresh = Problem("train-3", "Subtract one.", tests)  # another problem of the same place in another file
    save_problems(tmp_path / "leaky.jsonl", [same_name, same_text, fresh])
    value = "0.3" if key.endswith("share") else '"leaky.jsonl"'
    config = load_config(home.toml(), [f"{key}={value.replace('leaky', str(tmp_path / 'leaky'))}"])
    (line,) = leak_lines(config)
    if not key.endswith("share"):
        assert "2 of 3 held-out problems are training problems, such as named (1 by name, 1 by text)" in line
        return
    held_out = [one for one in train if is_held_out(one.problem_id, 0.3)]
    texts = {one.prompt for one in train if one not in held_out}
    num_leaked = sum(one.prompt in texts for one in held_out)
    assert f"{num_leaked} of {len(held_out)} held-out problems are training problems" in line
    assert f"(0 by name, {num_leaked} by text)" in line


def leaves_nothing(home: Home, *words: str) -> str:
    """What the command says; then the same command without `words` gets as far as its processes."""
    file = home.toml()
    answer = nouscoder("train", file, *words)
    assert answer.exit_code == 78, answer.output
    assert not (home.root / "runs").exists()
    smoke = [word for word in words if word == "--smoke64"]
    assert isinstance(CliRunner().invoke(app, ["train", str(file), *smoke]).exception, Started)
    return answer.stderr


def test_pages_that_cannot_be_served_are_found_before_the_folder_is_made(home: Home) -> None:
    assert leaves_nothing(home, "--set", "run.pages=hello") == (
        "nouscoder: run.pages: 'hello' is not of the form host:port\n"
    )
    shutil.rmtree(home.root / "runs")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        assert f"run.pages: cannot listen on {address}" in leaves_nothing(home, "--set", f"run.pages={address}")


def test_the_api_of_agents_that_cannot_be_served_is_found_too(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        assert f"generation.openai.http: cannot listen on {address}" in leaves_nothing(
            home, "--set", f"generation.openai.http={address}"
        )


def test_the_demos_pages_are_checked_before_its_folder_is_made(home: Home) -> None:
    answer = nouscoder("demo", "--set", "run.pages=hello")
    assert (answer.exit_code, answer.stderr) == (78, "nouscoder: run.pages: 'hello' is not of the form host:port\n")
    assert not list(Path.cwd().iterdir())


LOADED = [
    ('learner.objective={name="entry_point", entry_point="none:Mine"}', "learner.objective.entry_point 'none:Mine'"),
    ('learner.correction={kind="entry_point", entry_point="json:no"}', "learner.correction.entry_point 'json:no'"),
    ('broker.reward={rule="callable", entry_point="none:no"}', "broker.reward.entry_point 'none:no'"),
    (
        'generation.environment={kind="entry_point", entry_point="json:No"}',
        "generation.environment.entry_point 'json:No'",
    ),
]


@pytest.mark.parametrize("command", ["train", "demo"])
def test_code_of_the_user_that_cannot_be_loaded_is_found_before_the_folder_is_made(home: Home, command: str) -> None:
    """The demo prepared its model first; then a service ended."""
    given = [option for override, _ in LOADED for option in ("--set", override)]
    answer = nouscoder(command, *([home.toml()] if command == "train" else []), *given)
    assert answer.exit_code == 78, answer.output
    assert [f"{name} cannot be loaded" in answer.stderr for _, name in LOADED] == [True] * len(LOADED), answer.stderr
    assert not (home.root / "runs").exists()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("module", "sentence"), [("print('hello')\nasked = print", ""), ("import os; os._exit(3)", "end their process: 3")]
)
def test_what_a_module_of_the_user_does_when_it_is_imported_ends_with_its_process(
    home: Home, module: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write("mine.py", module)
    monkeypatch.chdir(home.root)
    config = load_config(None, ['broker.reward={rule="callable", entry_point="mine:asked"}'])
    assert [sentence in fault for fault in users_code_faults(config)] == ([True] if sentence else [])


@pytest.mark.parametrize("rates", ["nofile", "few.jsonl", "broken.jsonl"])
def test_pass_rates_of_a_smoke_test_are_read_before_its_folder_is_made(
    home: Home, rates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write("few.jsonl", json.dumps({"problem_id": "train-1", "passed": 1, "sampled": 2}) + "\n")
    home.write("broken.jsonl", "{\n")
    monkeypatch.chdir(home.root)
    assert rates in leaves_nothing(home, "--smoke64", "--pass-rates", rates)


def test_an_empty_configuration_is_named(home: Home) -> None:
    for name, command in (("empty.toml", "train"), ("empty.json", "prepare-run")):
        home.write(name, " \n")
        answer = nouscoder(command, home.root / name)
        assert answer.exit_code == 78
        assert answer.stderr == f"nouscoder: {home.root / name} is empty: nouscoder init writes a configuration\n"
