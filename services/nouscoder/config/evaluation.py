"""The section of the evaluations of a run: how its policies are measured, and when."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from nouscoder.config.base import InputFile, Section
from nouscoder.config.generation import GenerationSection


class EvaluationSection(Section):
    """How pass@1 of the policies of a run is measured: before, during and after the training."""

    every_batches: int = Field(
        0, ge=0, description="pass@1 is measured after this many batches too, while training goes on; 0: it is not"
    )
    samples: int = Field(1, ge=1, description="rollouts for each problem; pass@k is known for k up to this number")
    problems: InputFile = Field(
        "",
        description="problem file of the evaluations; empty: problems.held_out, or the share problems.held_out_share",
    )
    temperature: float = Field(-1.0, ge=-1, description="softmax temperature; -1: that of generation.sampling")
    top_p: float = Field(
        0.0, ge=0, le=1, description="nucleus sampling, with every engine; 0: top_p of generation.sampling"
    )
    top_k: int = Field(-1, ge=-1, description="number of candidate tokens; 0: all; -1: top_k of generation.sampling")
    min_p: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="a candidate has at least this share of the probability of the most likely token; -1: min_p of"
        " generation.sampling",
    )
    max_tokens_total: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in prompt and completion together, which may be more or less than in"
        " training; 0: generation.max_tokens_total",
    )
    max_new_tokens: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in a completion; 0: what evaluation.max_tokens_total leaves, or without"
        " that the number of generation.sampling",
    )
    seed: int = Field(-1, ge=-1, description="seed of the samples, which are the same for each policy; -1: run.seed")
    limit_s: float = Field(
        3600.0,
        gt=0,
        le=86_400,
        description="seconds for which generation keeps the policy that is measured at most; an evaluation that is"
        " sampled longer fails",
    )
    end_at_pass_at_1: float = Field(
        0.0, ge=0, le=1, description="the run ends early when an evaluation reaches this pass@1; 0: never"
    )
    end_after_no_gain: int = Field(
        0,
        ge=0,
        description="the run ends early when this many evaluations bring no gain over the best before; 0: never",
    )

    def _faults(self) -> Iterator[str]:
        if (self.end_at_pass_at_1 or self.end_after_no_gain) and not self.every_batches:
            yield "end_at_pass_at_1 and end_after_no_gain need every_batches"
        for name in ("temperature", "min_p"):
            if -1 < getattr(self, name) < 0:
                yield f"{name} must be at least 0, or -1 for that of generation.sampling"

    def of(self, generation: GenerationSection) -> GenerationSection:
        """`generation` as it is for evaluations: its context and sampling are those of this section where given."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "min_p": self.min_p}
        sampling = {name: value for name, value in given.items() if value >= 0}
        if self.top_p:
            sampling["top_p"] = self.top_p
        if self.max_new_tokens or self.max_tokens_total:
            sampling["max_new_tokens"] = self.max_new_tokens or max(1, self.max_tokens_total - 1)
        changed = {
            "max_tokens_total": self.max_tokens_total or generation.max_tokens_total,
            "sampling": generation.sampling.model_copy(update=sampling),
        }
        return generation.model_copy(update=changed)
