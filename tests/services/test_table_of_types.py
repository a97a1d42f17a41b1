"""One table of every model type of docs/models.md (`make model-table`): what each other test shows of it, in a line.

Templates are those of trl in .venv-trainers, or the *.jinja of the folder NOUSCODER_TEMPLATES.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.services.model_types import TYPES, tiny_model
from tests.services.test_end_of_turn import InThisProcess, folder_of
from tests.services.test_lora_of_model_types import ALL_LAYERS, SHARES
from tests.services.test_model_types import _REFUSED
from tests.services.test_published_templates import CASES, compared, family_of, folders
from tests.services.test_whole_checkpoints import load_faults, published
from tests.services.test_yarn import said_of_yarn

from nouscoder.learner.model.adapters import add_adapters, sizes_of_kinds
from nouscoder.learner.model.synthetic import write_policy_folder
from nouscoder.policy_folder import chat_template
from nouscoder.policy_folder.compose import compose_policy

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600), pytest.mark.usefixtures("one_thread")]

# The templates of a type, by their names in trl, llama.cpp and axolotl. Other types have none there.
TEMPLATES = {
    "apertus": "Apertus",
    "cohere": r"command-r-plus|^(ax|trl)-cohere$",
    "cohere2": r"command-r7b|command_a|cohere2$",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": r"deepseek_?v3|DeepSeek-V3|deepseek-r1$|Kimi-K2",
    "exaone4": "exaone4",
    "falcon_h1": "falcon_h1",
    "gemma": r"^(ax|trl)-gemma$",
    "gemma2": "gemma-2-",
    "gemma3_text": "gemma3$",
    "gemma4_text": "gemma-?4",
    "glm4_moe": "GLM-4|glm4moe",
    "gpt_oss": "gpt-?oss",
    "granite": "granite-3",
    "granitemoehybrid": "granite-4",
    "jamba": "jamba",
    "lfm2": "(?i)lfm2",
    "llama": r"(?i)llama-?3|SmolLM2|Distill-Llama",
    "llama4_text": "llama4",
    "minimax_m2": "MiniMax-M2",
    "ministral3": "Ministral-3",
    "mistral": r"Mistral-|mistral_v|Devstral",
    "nemotron_h": r"(?i)nemotron[_-](h|3|nano)",
    "phi3": r"(?i)phi-?_?(3|4)",
    "qwen2": r"(?i)qwen-?2[._]?5|qwen_25|QwQ|Distill-Qwen",
    "qwen3": r"(?i)qwen3(-0|_instruct|$)",
    "qwen3_5_text": r"(?i)qwen3[._]5",
    "qwen3_moe": "Qwen3-Coder|qwen3_instruct|qwen3$",
    "rwkv": "rwkv",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar-Open",
}
KINDS = {
    "one turn": ("single", "system", "space", "indent", "turns", "late"),
    "reasoning": ("reasoning", "trace", "cut", "traces"),
}
KINDS["tools"] = tuple(name for name in CASES if name not in (*KINDS["one turn"], *KINDS["reasoning"]))
HEAD = """Templates: cases with the template's own ids + cases in which it would lose a part of
the answer, and sft has the policy's own words, of the cases that it does not refuse.
Missing/unexpected: as transformers loads the written folder. LoRA: % of the decoder that has adapters.
YaRN: largest relative difference of transformers' frequencies from the paper's."""


@pytest.fixture(autouse=True)
def _quick_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_Process", InThisProcess)


def said_of_templates(kind: str, folder: Path) -> list[str]:
    """For one turn, reasoning and tools: cases with the template's own ids, of the cases that it does not refuse."""
    found = {name: Counter[str]() for name in KINDS}
    for path in folders():
        if kind not in TEMPLATES or not re.search(TEMPLATES[kind], path.stem):
            continue
        (made := folder / path.stem).mkdir()
        folder_of(made, family_of(path.read_text()))
        for name, cases in KINDS.items():
            found[name].update(compared(made, case).partition(" ")[0] for case in cases)
    return [
        f"{counts['equal']}+{counts['as']} of {counts.total() - counts['refused:']}" if counts else "no template"
        for counts in found.values()
    ]


def faults_of_folders(kind: str, folder: Path) -> str:
    """Missing and unexpected tensors of a policy that was trained whole."""
    first = folder / "first"
    write_policy_folder(first, tiny_model(kind))
    compose_policy(folder / "written", first, published(first, folder / "policies"))
    return load_faults(folder / "written")


def share_of_adapters(kind: str) -> str:
    model = tiny_model(kind)
    add_adapters(model, ALL_LAYERS, seed=1)
    sizes = sizes_of_kinds(model)
    return f"{100 * sum(size for (_, has_adapter), size in sizes.items() if has_adapter) / sum(sizes.values()):.1f}"


def test_the_table_of_every_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    with capsys.disabled():
        print(f"\n{len(folders())} templates. {HEAD}")
        print(f"| type | {' | '.join(KINDS)} | missing/unexpected | LoRA | YaRN |\n|---|{'---|' * (len(KINDS) + 3)}")
        for kind in TYPES:
            (folder := tmp_path / kind).mkdir()
            texts = said_of_templates(kind, folder)
            trained = kind not in _REFUSED
            faults = faults_of_folders(kind, folder) if trained else "refused"
            share = share_of_adapters(kind) if trained else "refused"
            (folder / "yarn").mkdir()
            yarn = said_of_yarn(kind, folder / "yarn") if trained else "refused"
            print(f"| {kind} | {' | '.join(texts)} | {faults} | {share} | {yarn} |", flush=True)
            counts = [re.findall(r"\d+", text) for text in texts]
            right = all(not numbers or int(numbers[0]) + int(numbers[1]) == int(numbers[2]) for numbers in counts)
            if not (right and faults in ("0/0", "refused") and share == SHARES.get(kind, "refused")):
                wrong.append(kind)
    assert wrong == []
