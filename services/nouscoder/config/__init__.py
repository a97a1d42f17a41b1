"""The configuration of a run. Each part of the project has its section in a module of its own; tree.py joins them."""

from __future__ import annotations

from nouscoder.config.base import ConfigError, Section
from nouscoder.config.broker import BrokerSection, RecordBackend
from nouscoder.config.generation import GenerationSection, SamplingSection
from nouscoder.config.learner import LearnerSection
from nouscoder.config.objective import DapoSettings, ObjectiveSettings
from nouscoder.config.run import DemoSection, PolicySection, ProblemsSection, RunSection
from nouscoder.config.tls import MutualTlsSection
from nouscoder.config.tree import Config, dump_config, load_config
from nouscoder.config.verifier import SandboxSection, TestsSection, TlsSection, VerifierSection

__all__ = [
    "BrokerSection",
    "Config",
    "ConfigError",
    "DapoSettings",
    "DemoSection",
    "GenerationSection",
    "LearnerSection",
    "MutualTlsSection",
    "ObjectiveSettings",
    "PolicySection",
    "ProblemsSection",
    "RecordBackend",
    "RunSection",
    "SamplingSection",
    "SandboxSection",
    "Section",
    "TestsSection",
    "TlsSection",
    "VerifierSection",
    "dump_config",
    "load_config",
]
