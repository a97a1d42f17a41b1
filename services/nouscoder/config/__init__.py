"""The configuration of a run. Each part of the project has its section in a module of its own; tree.py joins them."""

from __future__ import annotations

from nouscoder.config.broker import BrokerSection as BrokerSection
from nouscoder.config.broker import RecordBackend as RecordBackend
from nouscoder.config.broker import RewardSection as RewardSection
from nouscoder.config.generation import EntryPointSection as EntryPointSection
from nouscoder.config.generation import EnvironmentSection as EnvironmentSection
from nouscoder.config.generation import FeedbackSection as FeedbackSection
from nouscoder.config.generation import GenerationSection as GenerationSection
from nouscoder.config.generation import InterpreterSection as InterpreterSection
from nouscoder.config.generation import OpenAISection as OpenAISection
from nouscoder.config.generation import SamplingSection as SamplingSection
from nouscoder.config.generation import SingleTurnSection as SingleTurnSection
from nouscoder.config.learner import ActivationCheckpointing as ActivationCheckpointing
from nouscoder.config.learner import Attention as Attention
from nouscoder.config.learner import ComputeType as ComputeType
from nouscoder.config.learner import DecayKind as DecayKind
from nouscoder.config.learner import LearnerSection as LearnerSection
from nouscoder.config.learner import LoraSection as LoraSection
from nouscoder.config.learner import OptimizerKind as OptimizerKind
from nouscoder.config.learner import OptimizerStates as OptimizerStates
from nouscoder.config.learner import RewardModelSection as RewardModelSection
from nouscoder.config.learner import ScheduleSection as ScheduleSection
from nouscoder.config.learner import SftSection as SftSection
from nouscoder.config.run import EvaluationSection as EvaluationSection
from nouscoder.config.run import GuardsSection as GuardsSection
from nouscoder.config.run import MutualTlsSection as MutualTlsSection
from nouscoder.config.run import PlanSection as PlanSection
from nouscoder.config.run import PolicySection as PolicySection
from nouscoder.config.run import RunSection as RunSection
from nouscoder.config.run import SelfPlaySection as SelfPlaySection
from nouscoder.config.run import StageSection as StageSection
from nouscoder.config.tree import Config as Config
from nouscoder.config.tree import dump_config as dump_config
from nouscoder.config.tree import load_config as load_config
from nouscoder.config.verifier import JobsSection as JobsSection
from nouscoder.config.verifier import ModalSection as ModalSection
from nouscoder.config.verifier import SandboxSection as SandboxSection
from nouscoder.config.verifier import SpillOverSection as SpillOverSection
from nouscoder.config.verifier import TestsSection as TestsSection
from nouscoder.config.verifier import TlsSection as TlsSection
from nouscoder.config.verifier import ToolSessionsSection as ToolSessionsSection
from nouscoder.config.verifier import VerifierSection as VerifierSection
from nouscoder.sections import ConfigError as ConfigError
from nouscoder.sections import Section as Section
