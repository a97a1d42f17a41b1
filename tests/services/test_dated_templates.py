"""Chat templates that write the date of the day: Llama 3.2, SmolLM3, Granite 3, gpt-oss, Mistral Small."""

from __future__ import annotations

import json
import shutil
import tomllib
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.services.qwen3_tokenizer import qwen3_folder
from transformers.utils import chat_template_utils

from nouscoder.cli.evaluate import _asked
from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.tree import dump_config, read_given
from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.generation.environments import open_environment
from nouscoder.generation.environments.base import EnvironmentUnusable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.process import _asking
from nouscoder.policy_folder import prompt_file
from nouscoder.policy_folder.prompt_file import PROMPT_FILE, prompt_json, prompt_lines, recorded_prompt, trained_prompt
from nouscoder.policy_folder.tokenizer import load_tokenizer
from nouscoder.reward_model.model import AnswerEncoder
from nouscoder.run.folder import RunFolder
from nouscoder.run.preflight import with_policy_folder
from nouscoder.run.resume import note_given

# How the published templates ask for the date, and what they write on 2026-01-05.
CALLS = {
    "Llama 3.2": (
        '{%- if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{%- else %}26 Jul 2024{%- endif %}',
        "05 Jan 2026",
    ),
    "SmolLM3": (
        '{%- set today = strftime_now("%d %B %Y") -%}{{ "Today Date: " ~ today }}',
        "Today Date: 05 January 2026",
    ),
    "Granite 3": ("{{ \"Today's Date: \" + strftime_now('%B %d, %Y') }}", "Today's Date: January 05, 2026"),
    "gpt-oss": ('{{- "Current date: " + strftime_now("%Y-%m-%d") }}', "Current date: 2026-01-05"),
    "with a time": ("{{- strftime_now('%Y-%m-%d %H:%M') }}", "2026-01-05 00:00"),
}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
USER = [Message(Role.USER, "Add.")]


class Later(date):
    """The day of a later start."""

    @classmethod
    def today(cls) -> Later:
        return cls(2026, 3, 9)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it: from then on it is another day."""
    return lambda: monkeypatch.setattr(prompt_file, "date", Later)


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    shutil.copytree(qwen3_folder(), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(CALLS["Llama 3.2"][0] + TURNS)
    return folder


def test_a_reward_model_is_asked_on_one_day_whenever_it_is_trained_and_scores(dated: Path) -> None:
    """Its prompts had the day of the command, so scores of another day were not those of the training."""
    ids = AnswerEncoder(dated, 512)("Add.", "1")
    assert "26 Jul 2024" in load_tokenizer(dated).decode(ids)
    (dated / PROMPT_FILE).write_text(prompt_json(PromptSettings(date="2026-01-05")))
    assert "05 Jan 2026" in load_tokenizer(dated).decode(AnswerEncoder(dated, 512)("Add.", "1")), "its policy's"


def ids_of(config: Config, folder: Path) -> list[int]:
    prompts = Prompts(load_tokenizer(folder, config.generation.environment.date), config.generation.environment)
    return prompts._encode_prompt(PromptText("Add."))


@pytest.mark.parametrize("name", CALLS)
def test_a_template_writes_the_given_date_as_transformers_does_on_that_day(
    name: str, dated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, wanted = CALLS[name]
    (dated / "chat_template.jinja").write_text(call + TURNS)
    text = load_tokenizer(dated, "2026-01-05").render(USER)
    assert text.startswith(wanted)

    class ThatDay(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> ThatDay:
            return cls(2026, 1, 5)

    monkeypatch.setattr(chat_template_utils, "datetime", ThatDay)
    chat = [{"role": "user", "content": "Add."}]
    theirs: Any = chat_template_utils.render_jinja_template([chat], chat_template=call + TURNS)
    assert [text] == theirs[0]


def test_a_run_has_the_date_of_its_beginning_on_a_later_resume(dated: Path, later: Any) -> None:
    began = with_policy_folder(load_config(None, [f"policy.path={dated}"]))
    assert began.generation.environment.date == date.today().isoformat()
    recorded = Config.model_validate(tomllib.loads(dump_config(began)))
    later()
    resumed = with_policy_folder(recorded)
    assert resumed.generation.environment == began.generation.environment
    assert ids_of(resumed, dated) == ids_of(began, dated)
    fresh = with_policy_folder(load_config(None, [f"policy.path={dated}"]))
    assert fresh.generation.environment.date == "2026-03-09"
    assert ids_of(fresh, dated) != ids_of(began, dated)


def test_what_a_training_made_is_asked_with_its_date(dated: Path, later: Any) -> None:
    run = with_policy_folder(load_config(None, [f"policy.path={dated}", "generation.environment.date=2026-01-05"]))
    (dated / PROMPT_FILE).write_text(prompt_json(trained_prompt(run)))
    later()
    assert with_policy_folder(load_config(None, [f"policy.path={dated}"])).generation.environment.date == "2026-01-05"
    asked, lines = _asked(load_config(None), dated, "")
    assert asked.date == "2026-01-05"
    assert lines == ["prompts: messages, form plain, date 2026-01-05, as in the policy's training"]


def test_an_evaluation_of_several_days_has_one_date(dated: Path, tmp_path: Path, later: Any) -> None:
    first, _ = _asked(load_config(None), dated, "", tmp_path)
    (tmp_path / PROMPT_FILE).write_text(prompt_json(first))
    later()
    again, _ = _asked(load_config(None), dated, "", tmp_path)
    assert again == first
    assert _asked(load_config(None), dated, "")[0].date == "2026-03-09"


def test_a_policy_without_a_dated_template_has_no_date(dated: Path) -> None:
    (dated / "chat_template.jinja").write_text(TURNS)
    config = with_policy_folder(load_config(None, [f"policy.path={dated}"]))
    assert config.generation.environment.date == ""
    assert [*prompt_lines(config.generation.environment, dated)] == ["prompts: messages, form plain"]


def test_services_that_start_apart_need_the_date_in_their_configuration(dated: Path) -> None:
    """Each of them would write the day of its own start."""
    config = load_config(None, [f"policy.path={dated}"])
    with pytest.raises(EnvironmentUnusable, match=r"chat template of .*policy writes the date.*environment\.date"):
        open_environment(_asking(config, dated), dated)
    as_text = load_config(None, [f"policy.path={dated}", "generation.environment.prompt_as=text"])
    open_environment(_asking(as_text, dated), dated)
    given = load_config(None, [f"policy.path={dated}", "generation.environment.date=2026-01-05"])
    open_environment(_asking(given, dated), dated)


@pytest.mark.parametrize("value", ["5 Jan 2026", "2026-02-30", "today"])
def test_a_date_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"generation\.environment.*date.* is written as 2026-11-28"):
        load_config(None, [f"generation.environment.date='{value}'"])


def test_a_file_of_an_earlier_release_has_no_date(dated: Path, tmp_path: Path) -> None:
    record = json.loads(prompt_json(PromptSettings("messages")))
    del record["date"]
    (dated / PROMPT_FILE).write_text(json.dumps(record))
    assert recorded_prompt(dated) == PromptSettings("messages")
    file = tmp_path / "my.toml"
    file.write_text("[generation.environment]\ndate = 2026-01-05\n")  # a date of TOML
    folder = RunFolder.create(load_config(file, [f"run.root={tmp_path}", "run.name=r"]))
    note_given(folder, read_given(file))
    folder.close()
    assert load_config(file).generation.environment.date == "2026-01-05"
