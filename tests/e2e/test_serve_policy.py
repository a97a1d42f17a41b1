"""`nouscoder serve generation --policy FOLDER`: a trained folder or an adapter is served without a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.domain.policy import PolicyManifest
from nouscoder.errors import NousCoderError
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.policy_folder.policy_tensors import Adapter
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.policy_folder.weights_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, shards_of

pytestmark = pytest.mark.alone

PROMPT = "Print 1.\n"


def greedy(folder: Path) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    eos = tokenizer.eos_id
    found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=eos, pad_token_id=eos)
    return tokenizer.decode([token for token in found[0, ids.shape[1] :].tolist() if token != eos])


def asked(folder: Path, name: str) -> str:
    command = [sys.executable, "-m", "nouscoder", "serve", "generation", "--policy", str(folder)]
    command += ["--http", "127.0.0.1:0", "--set", "generation.threads=1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "is served as" in line)
        assert f"is served as {name} at" in line
        url = line.split(" at ")[1].strip()
        assert [one["id"] for one in httpx.get(f"{url}/models").json()["data"]] == [name, f"{name}@0"]
        body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{url}/completions", json=body, timeout=60).json()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        text: str = answer["choices"][0]["text"]
        return text
    finally:
        process.kill()
        process.communicate()


@pytest.mark.heavy
def test_a_folder_and_an_adapter_answer_as_transformers(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    policy: Any = random_policy(0)
    policy.lm_head.weight.data.mul_(20)  # far from uniform, so that rounding changes no greedy token
    write_policy_folder(base, policy)
    assert asked(base, "base") == greedy(base)
    a, b = torch.randn(2, policy.config.hidden_size), torch.randn(policy.config.intermediate_size, 2)
    layer = policy.model.layers[0].mlp.up_proj
    digest = PolicyManifest(0, 0, str(base), shards_of(base)).digest
    made = Adapter(4.0, {"model.layers.0.mlp.up_proj": (a, b)}, digest)
    adapter.mkdir()
    save_file(made.tensors, adapter / ADAPTER_FILE, made.metadata)
    (adapter / ADAPTER_CONFIG_FILE).write_text(made.config(str(base)))
    with torch.no_grad():
        layer.weight.add_(2.0 * b @ a)
    write_policy_folder(tmp_path / "merged", policy)
    assert asked(adapter, "adapter") == greedy(tmp_path / "merged") != greedy(base)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ({}, "is not a folder"),
        ({"config.toml": "[run]"}, "config.json"),
        (
            {"adapter_model.safetensors": "", "adapter_config.json": json.dumps({"base_model_name_or_path": "/gone"})},
            "is an adapter of /gone, which is no folder here",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_is_one_sentence(make: dict[str, str], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, text in make.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    answer = CliRunner().invoke(app, ["serve", "generation", "--policy", str(folder)])
    assert isinstance(answer.exception, NousCoderError)
    assert says in str(answer.exception)
    assert "\n" not in str(answer.exception)
