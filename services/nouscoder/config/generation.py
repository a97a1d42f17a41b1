"""The generation worker's section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from nouscoder.config.base import OutputPath, Section
from nouscoder.domain.policy import Transport


class SamplingSection(Section):
    """How training rollouts are sampled."""

    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 always takes the most likely token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: cumulative probability of the candidate tokens"
    )
    max_new_tokens: int = Field(128, ge=1, description="maximum number of tokens in a completion")


class EnvironmentSection(Section):
    """How a problem becomes a prompt, and a completion an answer."""

    kind: Literal["single_turn"] = Field("single_turn", description="single_turn: one prompt, one completion")
    prompt_as: Literal["auto", "text", "messages"] = Field(
        "text",
        description="text: the prompt as it is; messages: as a user's message in the policy's chat template;"
        " auto: messages if the policy has a chat template, else text",
    )
    prompt_template: str = Field(
        "{prompt}", pattern=r"\{prompt\}", description="text around {prompt}; a problem may have its own template"
    )
    system_prompt: str = Field("", description="a system message before the prompt (prompt_as messages); may be empty")


class GenerationSection(Section):
    """The generation worker and its engine."""

    engine: Literal["torch", "fake"] = Field(
        "torch", description="torch samples from the policy; fake generates tokens without a model, for tests"
    )
    grpc: str = Field("127.0.0.1:50053", description="address to listen on; port 0 takes a free one")
    metrics: str = Field("127.0.0.1:0", description="address of the Prometheus page")
    grpc_health: str = Field(
        "", description="address of a second port for health checks, not encrypted; empty: no port"
    )
    max_running: int = Field(64, ge=1, description="maximum number of rollouts decoded at the same time")
    max_tokens_total: int = Field(512, ge=2, description="maximum number of tokens in prompt and completion together")
    threads: int = Field(1, ge=1, description="CPU threads of the engine")
    device: str = Field("cpu", description="torch device")
    policy_from: Transport = Field(
        Transport.FOLDER,
        description="folder: read policies from a disk shared with the learner; learner: download them from it",
    )
    cache: OutputPath = Field(
        Path("/tmp/policies"),
        description="with policy_from learner: folder for downloaded policies; the newest 2 are kept",
    )
    policy_patience_s: float = Field(
        900.0, gt=0, description="with policy_from learner: seconds to wait for the learner before giving up"
    )
    sampling: SamplingSection = SamplingSection()
    environment: EnvironmentSection = EnvironmentSection()
