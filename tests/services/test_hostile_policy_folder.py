"""Policy folders made by strangers: no code of theirs runs, and their chat templates have limits."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nouscoder.config.generation import EnvironmentSection, GenerationSection
from nouscoder.demo.policy import build_policy, save_policy
from nouscoder.domain.conversation import Message, Role
from nouscoder.errors import Unusable
from nouscoder.generation.engines.architecture import Architecture
from nouscoder.generation.engines.base import EngineUnusable
from nouscoder.generation.engines.torch import TorchEngine
from nouscoder.generation.engines.vllm_start import _arguments
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.openai.completions import PromptEncoder
from nouscoder.generation.openai.schema import ApiFault, ChatRequest, CompletionRequest, parsed
from nouscoder.learner.model.weights import empty_model, load_model
from nouscoder.policy_folder import chat_template
from nouscoder.policy_folder.chat_template import ChatTemplate, TemplateFailed, TemplateLimit
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer
from nouscoder.reward_model.model import load_reward_model, new_reward_model

ROOT = Path(__file__).parents[2]
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
EVIL = """
import pathlib
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
pathlib.Path({marker!r}).touch()
class Evil(Qwen3Config): model_type = {model_type!r}
class EvilModel(Qwen3ForCausalLM): config_class = Evil
class EvilTokenizer(PreTrainedTokenizerFast): pass
"""


def engine_of(folder: Path) -> TorchEngine:
    return TorchEngine(folder, max_running=1, max_tokens_total=16)


LOADERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "model": (load_model, Unusable),
    "empty model": (empty_model, Unusable),
    "tokenizer": (load_tokenizer, TokenizerError),
    "reward model": (load_reward_model, Unusable),
    "new reward model": (new_reward_model, Unusable),
    "torch engine": (engine_of, EngineUnusable),
    "vllm engine": (Architecture, EngineUnusable),
}


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder with code of its own, for a model type. Whoever is asked on the terminal says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def make(model_type: str) -> Path:
        folder = tmp_path / "evil"
        save_policy(build_policy(seed=0), folder)
        (folder / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "RAN"), model_type=model_type))
        classes = {name: f"evil.{'Evil' if name == 'AutoConfig' else 'EvilModel'}" for name in CLASSES}
        changed(folder / "config.json", model_type=model_type, auto_map=classes)
        own = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
        changed(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="EvilTokenizer")
        return folder

    return make


@pytest.mark.parametrize("name", LOADERS)
def test_code_of_a_folder_is_refused_in_one_sentence(hostile: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    load, error = LOADERS[name]
    with pytest.raises(error, match=r"code of its own \(auto_map\), which NousCoder never runs") as found:
        load(hostile("evil"))
    assert "\n" not in str(found.value)
    assert str(tmp_path / "evil") in str(found.value)
    assert not (tmp_path / "RAN").exists()


def test_a_folder_whose_classes_are_known_is_loaded_without_its_code(
    hostile: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = hostile("qwen3")
    changed(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert type(load_model(folder)).__module__.startswith("transformers.")
    assert load_tokenizer(folder).encode("print(1)")
    assert not (tmp_path / "RAN").exists()


class Touching:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("name", ["model", "new reward model"])
@pytest.mark.parametrize("torch_format", [True, False])
def test_pickled_weights_are_not_read(tmp_path: Path, name: str, torch_format: bool) -> None:
    folder, marker = tmp_path / "policy", tmp_path / "RAN"
    save_policy(build_policy(seed=0), folder)
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    if torch_format:
        torch.save({"weight": Touching(marker)}, weights)
    else:
        weights.write_bytes(pickle.dumps(Touching(marker)))
    load, error = LOADERS[name]
    with pytest.raises(error, match="safetensors"):
        load(folder)
    assert not marker.exists()


def test_only_one_module_calls_the_loaders_of_transformers() -> None:
    """Each of them asks on the terminal whether a folder's code may run, unless it is told."""
    allowed = ROOT / "services/nouscoder/policy_folder/pretrained.py"
    files = [file for part in ("services", "examples", "deploy") for file in (ROOT / part).rglob("*.py")]
    assert allowed in files
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf8")))
        if (isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config", "apply_chat_template"))
        or (isinstance(node, ast.Name) and node.id in ("pipeline", "AutoProcessor", "snapshot_download"))
    ]
    calls = [place for place in found if not place.startswith(str(allowed.relative_to(ROOT)))]
    assert [place.rpartition(":")[0] for place in calls] == ["services/nouscoder/policy_folder/inspection.py"]
    assert len(found) == len(calls) + 2


def test_vllm_runs_no_code_of_the_folder(tmp_path: Path) -> None:
    assert _arguments(GenerationSection(), tmp_path, 16)["trust_remote_code"] is False


# Chat templates.

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOPS,
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "folded when compiled": '{{ "a" * 10**10 }}',
    "multiplied": '{% set n = messages|length %}{{ "a" * (n * 10**10) }}',
    "output": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
}
REFUSED = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "endless recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "exception": "{{ raise_exception('no') }}",
    "syntax": "{% for",
}
ONE = [[Message(Role.USER, "Add.")]]


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>"}, Path("/models/strange"))


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of CPU time, for the processes too."""
    code = "import nouscoder.policy_folder.chat_template as t, socket, sys; t.CPU_S = 1; t.MEMORY_BYTES = 2**28;"
    code += "t.serve(socket.socket(fileno=int(sys.argv[1])))"
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    monkeypatch.setattr(chat_template, "_COMMAND", ("-P", "-c", code))


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.usefixtures("one_second")
def test_a_template_that_never_ends_is_stopped(name: str) -> None:
    with pytest.raises(TemplateLimit, match="chat template of /models/strange took more than 1 s of CPU time"):
        template_of(ENDLESS[name]).render(ONE, None)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("one_second")
def test_a_template_gets_limited_memory(name: str) -> None:
    with pytest.raises(TemplateLimit, match=r"of /models/strange (needs more than 256 MiB|writes more than)"):
        template_of(LARGE[name]).render(ONE, None)


def test_what_a_template_raises_is_one_sentence() -> None:
    """The process goes on; the next template gets it here, which saves its start."""
    idle = None
    for name, text in REFUSED.items():
        template = template_of(text)
        template._idle = idle or template._idle
        with pytest.raises(TemplateFailed, match=r"the chat template refuses the messages: .") as found:
            template.render(ONE, None)
        assert not isinstance(found.value, TemplateLimit), name
        idle = template._idle
        assert len(idle) == 1


@pytest.mark.usefixtures("one_second")
def test_a_slow_conversation_delays_no_other() -> None:
    """The short ones are rendered while the process of the slow one is at work."""
    template = template_of("{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}{{ messages[0].content }}")
    ended = threading.Event()

    def slow() -> None:
        with pytest.raises(TemplateLimit):
            template.render([[Message(Role.USER, "slow")]], None)
        ended.set()

    template.render(ONE, None)
    template._idle.append(chat_template._Process())  # both have begun, however busy the machine is
    template.render(ONE, None)
    thread = threading.Thread(target=slow)
    thread.start()
    rendered = 0
    while not ended.is_set():
        assert template.render(ONE, None) == ["Add."]
        rendered += 1
    thread.join()
    assert rendered > 10
    assert len(template._idle) == 1


def test_a_half_surrogate_and_a_long_text_arrive_unchanged() -> None:
    text = "é\ud800\x00" + "x\n" * 500_000
    conversations = [[Message(Role.SYSTEM, text)], [Message(Role.USER, "b")]]
    template = template_of("{{ bos_token }}{{ messages[0].content }}{{ enable_thinking }}")
    assert template.render(conversations, False) == [f"<s>{text}False", "<s>bFalse"]


@pytest.mark.usefixtures("one_second")
def test_an_environment_refuses_a_template_that_never_ends(tmp_path: Path) -> None:
    save_policy(build_policy(seed=0), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(LOOPS)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(EnvironmentUnusable, match=f"the chat template of {tmp_path} took more than"):
        Prompts(tokenizer, EnvironmentSection(prompt_as="messages"))
    assert Prompts(tokenizer, EnvironmentSection(prompt_as="text"))


@pytest.mark.usefixtures("one_second")
async def test_prompts_of_others_are_encoded_while_a_template_is_at_work(tmp_path: Path) -> None:
    """The lock of the tokenizer is not held meanwhile."""
    save_policy(build_policy(seed=0), tmp_path)
    slow_for_one = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(slow_for_one)
    encoder = PromptEncoder(load_tokenizer(tmp_path), 100)

    async def chat(text: str) -> tuple[int, ...]:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return await encoder.of_chat(parsed(ChatRequest, json.dumps(body).encode()), text)

    completion = parsed(CompletionRequest, json.dumps({"model": "m", "prompt": "Add."}).encode())
    wanted = await chat("Add.")
    slow = asyncio.create_task(chat("slow"))
    encoded = 0
    while not slow.done():
        assert await chat("Add.") == wanted
        assert await encoder.of_completion(completion, "another")
        encoded += not slow.done()
    with pytest.raises(ApiFault, match=r"messages: the chat template of .* took more than 1 s of CPU time"):
        await slow
    assert encoded, "the others waited for the slow template"
