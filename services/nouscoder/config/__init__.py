"""The configuration of a run. Each part of the project has its section in a module of its own; tree.py joins them.

Every name that is imported here is also one of this module: pyproject.toml says so to mypy and to ruff.
"""

from __future__ import annotations

from nouscoder.config.base import ConfigError, Section
from nouscoder.config.broker import BrokerSection, RecordBackend, RewardSection
from nouscoder.config.generation import (
    EntryPointSection,
    EnvironmentSection,
    FeedbackSection,
    GenerationSection,
    InterpreterSection,
    OpenAISection,
    SamplingSection,
    SingleTurnSection,
)
from nouscoder.config.learner import (
    ActivationCheckpointing,
    Attention,
    ComputeType,
    LearnerSection,
    LoraSection,
    OptimizerKind,
    OptimizerStates,
    RewardModelSection,
    SftSection,
)
from nouscoder.config.objective import (
    AdvantageSection,
    Aggregation,
    CispoSettings,
    CorrectionKind,
    CorrectionSection,
    DapoSettings,
    DecayKind,
    DistillationSettings,
    EntropySection,
    GppoSettings,
    GrpoSettings,
    GspoSettings,
    KlEstimator,
    ObjectiveSettings,
    PpoSettings,
    Proximal,
    ReferenceKlSection,
    ReinforcePlusPlusSettings,
    ScheduleSection,
)
from nouscoder.config.run import (
    EvaluationSection,
    GuardsSection,
    MutualTlsSection,
    PlanSection,
    PolicySection,
    RunSection,
    SelfPlaySection,
    StageSection,
)
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
