"""The configuration of a run. Each part of the project has its section in a module of its own; tree.py joins them."""

from __future__ import annotations

from nouscoder.config.base import ConfigError, Section
from nouscoder.config.broker import BrokerSection, RecordBackend, RewardSection
from nouscoder.config.environment import (
    EntryPointSection,
    EnvironmentSection,
    FeedbackSection,
    InterpreterSection,
    SingleTurnSection,
)
from nouscoder.config.generation import GenerationSection, OpenAISection, SamplingSection
from nouscoder.config.learner import ActivationCheckpointing, Attention, LearnerSection
from nouscoder.config.loss_terms import (
    AdvantageSection,
    CorrectionKind,
    CorrectionSection,
    DecayKind,
    EntropySection,
    KlEstimator,
    ReferenceKlSection,
    ScheduleSection,
)
from nouscoder.config.objective import (
    Aggregation,
    CispoSettings,
    ClippedSettings,
    DapoSettings,
    DistillationSettings,
    GppoSettings,
    GrpoSettings,
    GspoSettings,
    ObjectiveSettings,
    PpoSettings,
    Proximal,
    ReinforcePlusPlusSettings,
)
from nouscoder.config.plan import PlanSection, StageSection, YarnSection
from nouscoder.config.run import DemoSection, GuardsSection, PolicySection, ProblemsSection, RunSection
from nouscoder.config.self_play import SelfPlaySection
from nouscoder.config.sft import SftScheduleSection, SftSection
from nouscoder.config.tls import MutualTlsSection
from nouscoder.config.training import ComputeType, LoraSection, OptimizerKind, OptimizerStates, RewardModelSection
from nouscoder.config.tree import Config, dump_config, load_config
from nouscoder.config.verifier import (
    JobsSection,
    ModalSection,
    SandboxSection,
    SpillOverSection,
    TestsSection,
    TlsSection,
    ToolSessionsSection,
    VerifierSection,
)

__all__ = [
    "ActivationCheckpointing",
    "AdvantageSection",
    "Aggregation",
    "Attention",
    "BrokerSection",
    "CispoSettings",
    "ClippedSettings",
    "ComputeType",
    "Config",
    "ConfigError",
    "CorrectionKind",
    "CorrectionSection",
    "DapoSettings",
    "DecayKind",
    "DemoSection",
    "DistillationSettings",
    "EntropySection",
    "EntryPointSection",
    "EnvironmentSection",
    "FeedbackSection",
    "GenerationSection",
    "GppoSettings",
    "GrpoSettings",
    "GspoSettings",
    "GuardsSection",
    "InterpreterSection",
    "JobsSection",
    "KlEstimator",
    "LearnerSection",
    "LoraSection",
    "ModalSection",
    "MutualTlsSection",
    "ObjectiveSettings",
    "OpenAISection",
    "OptimizerKind",
    "OptimizerStates",
    "PlanSection",
    "PolicySection",
    "PpoSettings",
    "ProblemsSection",
    "Proximal",
    "RecordBackend",
    "ReferenceKlSection",
    "ReinforcePlusPlusSettings",
    "RewardModelSection",
    "RewardSection",
    "RunSection",
    "SamplingSection",
    "SandboxSection",
    "ScheduleSection",
    "Section",
    "SelfPlaySection",
    "SftScheduleSection",
    "SftSection",
    "SingleTurnSection",
    "SpillOverSection",
    "StageSection",
    "TestsSection",
    "TlsSection",
    "ToolSessionsSection",
    "VerifierSection",
    "YarnSection",
    "dump_config",
    "load_config",
]
