"""What newcomers typed: each wrong input gets one sentence that names what is wrong, an exit code, and no traceback.

One process answers all command lines (`answers`), so a line costs milliseconds. It may read only what the modes of
files allow, also when root runs the tests.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import struct
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.domain.submission import LANGUAGES
from nouscoder.http_server.listener import start_http
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox
from nouscoder.verifier.toolchains.languages import installed

MAKE = "make a problem file with nouscoder data import"
GIVEN = ("train my.toml --set problems.train=", "grade samples.jsonl --problems")
# Command line, exit code, a part of the sentence.
TYPED = [
    # Files and names.
    ("grade nofile.jsonl", 78, "nofile.jsonl cannot be read: No such file or directory"),
    ("grade empty.jsonl", 78, "empty.jsonl holds no submission"),
    ("grade problems.csv --problems problems.jsonl --out problems.csv", 78, "is the input itself"),
    ("grade samples.jsonl --problems nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("grade samples.jsonl --resume", 2, "--resume needs --out FILE"),
    (
        "grade samples.jsonl --problems problems.jsonl --server http://127.0.0.1:1 --ca nofile.pem",
        78,
        "--ca nofile.pem",
    ),
    ("data inspect .", 78, "cannot be read: Is a directory"),
    ("data inspect problems.csv", 78, f"{MAKE} generic"),
    ("data inspect nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("data import apps nofile.parquet --out x.parquet", 78, "nofile.parquet does not exist"),
    ("data import appz apps.jsonl --out x.parquet", 78, "there is no format 'appz': did you mean apps?"),
    ("data import apps apps.jsonl --out x.json", 78, "--out x.json must end in .parquet or .jsonl"),
    ("data import apps apps.jsonl --out my.toml/x.parquet", 74, "my.toml"),
    ("data import apps hub:nosuch --out x.parquet", 78, "hub:"),
    ("data filter nofile.toml", 78, "nofile.toml cannot be read"),
    ("data filter filter.toml", 78, "'num_test' is not a filter: did you mean num_tests?"),
    ("data stats nope", 69, "no run nope is in runs/, and broker at"),
    ("data stats problems.jsonl --limit 3", 2, "it is for the name of a run"),
    ("data stats problems.csv", 78, f"{MAKE} generic"),
    ("status", 69, "no run is in runs/, and no broker at"),
    ("dead-letters", 69, "no run is in runs/, and no broker at"),
    *(
        (
            f"{command} {name}".replace("= ", "="),
            78,
            f"the columns {columns}: {MAKE} {form}",
        )
        for command in (
            "data inspect",
            "init --out new.toml model",
            "train my.toml --set problems.train=",
            "grade samples.jsonl --problems",
        )
        for name, columns, form in (
            ("problems.csv", "prompt, tests", "generic --column prompt=COLUMN --column tests=COLUMN"),
            ("array.json", "Nr, Aufgabe, Tests", "generic --column prompt=COLUMN --column tests=COLUMN"),
            ("humaneval.jsonl", "task_id, prompt, canonical_solution, test, entry_point", "humaneval"),
            ("verl.json", "data_source, prompt, reward_model", "generic"),
            ("verl.parquet", "data_source, prompt, reward_model", "generic"),
        )
    ),
    ("data inspect pretty.json", 78, "write one JSON object a line, as by: jq -c . pretty.json"),
    ("data inspect ours.json", 78, "write one JSON object a line, as by: jq -c '.[]' ours.json"),
    ("data synthesize problems.jsonl --url http://127.0.0.1:1/v1 --model m", 78, "seed_id"),
    # Services.
    ("serve verifier --http 127.0.0.1:{busy} --grpc 127.0.0.1:0", 78, "Address already in use"),
    ("serve verifier --http localhost", 78, "'localhost' is not of the form host:port"),
    ("serve verifier --http 127.0.0.1:80a", 78, "'127.0.0.1:80a' is not of the form host:port"),
    ("serve verifier --set verifier.slots=abc", 78, "unknown key verifier.slots: did you mean"),
    ("serve verifier --set verifier.sandbox.backend=docker", 78, "must be 'local'"),
    ("serve verifier --config nofile.toml", 78, "nofile.toml does not exist"),
    ("serve verifyer", 2, "'verifyer' is not one of"),
    ("serve broker --config nofile.toml", 78, "nofile.toml does not exist"),
    # A configuration.
    ("train", 2, "give CONFIG or --recipe NAME"),
    ("train nofile.toml", 78, "nofile.toml does not exist"),
    ("train --recipe deepcoder", 78, "did you mean deepcoder-14b?"),
    ("train broken.toml", 78, "broken.toml cannot be read: Invalid value"),
    ("train problems.csv", 78, "problems.csv cannot be read"),
    ("train my.toml --set 'run.name=a b'", 78, "run.name: expected: name of the run"),
    ("train my.toml --set broker.batch_size=17", 78, "batch_size 17 must be a multiple of group_size"),
    ("train my.toml --set run.total_batches=abc", 78, "run.total_batches: must be a valid integer (given: 'abc')"),
    ("train my.toml --set nonsense", 78, "--set 'nonsense' is not of the form a.b=value"),
    ("train my.toml --set run.nmae=x", 78, "unknown key run.nmae: did you mean run.name?"),
    ("train my.toml --set broker.curriculum.size=3", 78, "is a key for name=subset, and not for name=epochs"),
    ("train my.toml --set generation.device=cuda", 78, 'generation.device is "cuda"'),
    ("train my.toml --set generation.engine=vllm", 78, "vLLM is not installed"),
    ("train my.toml --set problems.train=nofile.jsonl", 78, "problems.train:"),
    ("train my.toml --set evaluation.problems=model", 78, "evaluation.problems:"),
    (
        "train my.toml --set broker.curriculum.name=pass_rates --set broker.curriculum.pass_rates=solved.jsonl",
        78,
        "broker.curriculum pass_rates leaves no problem",
    ),
    (
        "train my.toml --set broker.curriculum.name=subset --set broker.curriculum.size=500",
        78,
        "broker.curriculum.size is 500",
    ),
    ("train my.toml --set learner.first_checkpoint=model", 78, "it has no manifest.json"),
    ("train my.toml --resume", 78, "there is no run to resume in"),
    ("train my.toml --set policy.path=notok", 78, "notok has no tokenizer"),
    ("train my.toml --set policy.path=nocfg", 78, "nocfg has no config.json"),
    ("train my.toml --set policy.path=badcfg", 78, "it has no model_type"),
    ("train my.toml --set policy.path=bert", 78, "model.safetensors"),
    ("train my.toml --set policy.path=modle", 78, "did you mean model?"),
    ("train my.toml --set policy.path=locked", 74, "locked"),
    ("train my.toml --set policy.path=unreadable", 78, "unreadable/model.safetensors"),
    # A new configuration.
    ("init notok problems.jsonl --out new.toml", 78, "notok has no tokenizer"),
    ("init nocfg problems.jsonl --out new.toml", 78, "nocfg has no config.json"),
    ("init badcfg problems.jsonl --out new.toml", 78, "it has no model_type"),
    ("init bert problems.jsonl --out new.toml", 78, "model.safetensors"),
    ("init bert-whole problems.jsonl --out new.toml --engine torch", 78, "bert"),
    ("init modle problems.jsonl --out new.toml", 78, "did you mean model?"),
    ("init policy.gguf problems.jsonl --out new.toml", 78, "nouscoder model import"),
    ("init unreadable problems.jsonl --out new.toml", 78, "unreadable/model.safetensors"),
    ("init locked problems.jsonl --out new.toml", 74, "locked"),
    ("init model nofile.jsonl --out new.toml", 78, "nofile.jsonl does not exist"),
    ("init model empty.jsonl --out new.toml", 78, "empty.jsonl holds no problem"),
    ("init model model --out new.toml", 78, "Is a directory"),
    ("init model problems.jsonl --out my.toml", 78, "my.toml exists already"),
    ("init model problems.jsonl --out nowhere/new.toml", 78, "nowhere/new.toml cannot be written"),
    ("init Qwen/Qwen3-0.6B nofile.jsonl --out new.toml", 78, "nofile.jsonl does not exist"),
    # Evaluations, policies and runs.
    ("eval problems.jsonl", 2, "give one of --url (with --model), --policy and --samples"),
    ("eval problems.jsonl --url http://127.0.0.1:1/v1", 2, "--url needs --model"),
    ("eval problems.jsonl --policy notok --n 1 --max-tokens 10", 78, "notok has no tokenizer"),
    ("eval problems.jsonl --policy unreadable --n 1", 78, "unreadable/model.safetensors"),
    ("eval nofile.jsonl --samples samples.jsonl", 78, "nofile.jsonl cannot be read"),
    ("eval problems.jsonl --samples nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("eval compare a b", 78, "a has no report.json"),
    ("export runs/nope --to x", 78, "runs/nope is not a run folder"),
    ("report runs/nope", 78, "there is no folder runs/nope"),
    ("report compare runs/nope runs/nope", 78, "there is no folder runs/nope"),
    ("status --config runs/nope/config.toml", 78, "runs/nope/config.toml does not exist"),
    ("runs rm nope", 1, "Aborted"),
    ("sft import nofile.parquet --out x.jsonl", 78, "nofile.parquet"),
    ("model import nofile.gguf --out x", 78, "nofile.gguf"),
    ("plan show nofile.toml", 78, "nofile.toml does not exist"),
    ("recipes show nope", 78, "there is no recipe 'nope'"),
    ("tokens new ''", 78, "name"),
    ("--nonsense", 2, "No such option"),
    ("trian my.toml", 2, "No such command 'trian'"),
]
TYPED_TOO = [
    (
        "grade samples.jsonl --problems problems.jsonl --server localhost:1",
        78,
        "the URL of the grading service cannot be 'localhost:1': write http://localhost:1",
    ),
    ("grade samples.jsonl --problems problems.jsonl --server ''", 78, "the URL of the grading service cannot be ''"),
    ("grade samples.jsonl --problems problems.jsonl --server ftp://localhost:1", 78, "write http://HOST:PORT"),
    (
        "grade samples.jsonl --problems problems.jsonl --server http://127.0.0.1:99999",
        78,
        "cannot be 'http://127.0.0.1:99999'",
    ),
    ("grade samples.jsonl --problems problems.jsonl --server 'http://[::1'", 78, "cannot be 'http://[::1'"),
    ("grade samples.jsonl --problems problems.jsonl --server http://", 78, "cannot be 'http://'"),
    ("grade samples.jsonl --problems problems.jsonl --server http://nosuch.invalid", 69, "its host name is not known"),
    (
        "grade samples.jsonl --problems problems.jsonl --server https://127.0.0.1:1 --ca problems.jsonl",
        78,
        "--ca problems.jsonl cannot be used",
    ),
    ("eval problems.jsonl --url localhost:1 --model m", 78, "--url cannot be 'localhost:1': write http://localhost:1"),
    ("eval problems.jsonl --url http://127.0.0.1:99999 --model m", 78, "--url cannot be"),
    ("eval problems.jsonl --samples samples.jsonl --verifier localhost:1", 78, "--verifier cannot be 'localhost:1'"),
    ("data synthesize seeds.jsonl --url localhost:1 --model m", 78, "--url cannot be 'localhost:1'"),
    ("data synthesize seeds.jsonl --url http://127.0.0.1:1 --solver-url x --model m", 78, "--solver-url cannot be 'x'"),
    ("sft sample problems.jsonl --url localhost:1 --model m --out y", 78, "--url cannot be 'localhost:1'"),
    ("bench verifier --peer foo", 2, "--peer 'foo': the kinds are go-judge, sandboxfusion"),
    ("bench verifier --peer go-judge foo", 2, "--peer go-judge: 'foo' is not of the form http://host:port"),
    ("serve verifier --http 127.0.0.1:99999", 78, "'127.0.0.1:99999': a port is at most 65535"),
    ("serve verifier --http 127.0.0.1:-1", 78, "'127.0.0.1:-1' is not of the form host:port"),
    ("serve verifier --http :8080", 78, "':8080' is not of the form host:port"),
    ("serve verifier --http nosuch.invalid:80", 78, "cannot listen on nosuch.invalid:80"),
    ("serve verifier --http 8.8.8.8:8080", 78, "cannot listen on 8.8.8.8:8080"),
    ("serve verifier --grpc foo", 78, "'foo' is not of the form host:port"),
    ("serve verifier --grpc unix:", 78, "name a new file in a folder"),
    ("serve verifier --grpc unix:/nonexistent/x.sock", 78, "cannot listen on unix:/nonexistent/x.sock"),
    (
        "serve verifier --grpc unix:{long}",
        78,
        "with at most 107 bytes",
    ),
    ("serve verifier --metrics foo", 78, "'foo' is not of the form host:port"),
    ("serve verifier --set verifier.tokens_file=nofile", 78, "nofile cannot be read: No such file or directory"),
    (
        "serve verifier --set verifier.tokens_file=problems.jsonl",
        78,
        "problems.jsonl:1: expected client-name:sha256hex",
    ),
    ("serve verifier --set verifier.tokens_file=latin.csv", 78, "latin.csv cannot be read: byte 2 is not UTF-8"),
    (
        "serve verifier --set verifier.processes=0",
        78,
        "verifier.processes: must be greater than or equal to 1 (given: 0)",
    ),
    ("serve verifier --set verifier.tls.certificate=nofile.pem", 78, "verifier.tls: give certificate and key together"),
    ("serve broker --http 127.0.0.1:0", 2, "it is for verifier and generation"),
    ("serve generation --policy nomodel", 78, "nomodel is not a folder"),
    ("status --broker foo", 78, "'foo' is not of the form host:port"),
    ("pause --broker 127.0.0.1:99999", 78, "a port is at most 65535"),
    ("dead-letters --broker foo", 78, "'foo' is not of the form host:port"),
    ("demo --seed -1", 2, "greater than or equal to 0"),
    ("demo --engine tensorrt", 2, "'tensorrt' is not one of"),
    ("demo --set run.seed=5", 2, "--set run.seed is --seed of the demo"),
    ("demo --set run.name=x", 2, "--set run.name is --name of the demo"),
    ("demo --set run.seed.x=1", 78, "--set run.seed: seed is a section already"),
    ("demo --set nothing", 78, "--set 'nothing' is not of the form a.b=value"),
    ("demo --set =3", 78, "--set '=3' is not of the form a.b=value"),
    ("demo --name ../evil", 78, "nouscoder: run.name: expected: name of the run"),
    ("train --recipe ../demo", 78, "there is no recipe '../demo': did you mean demo?"),
    ("train my.toml extra", 2, "unexpected extra argument"),
    ("train my.toml --smoke64 --smoke-batches -1", 2, "greater than or equal to 0"),
    ("init model problems.jsonl --out new.toml --engine vlm", 2, "'vlm' is not one of"),
    ("init model problems.jsonl --out new.toml --set run.nmae=x", 78, "unknown key run.nmae: did you mean run.name?"),
    (
        "init model problems.jsonl --out new.toml --set run.total_batches=x",
        78,
        "run.total_batches: must be a valid integer",
    ),
    ("init a/b/c problems.jsonl --out new.toml", 78, "a model of a hub is named ORGANISATION/MODEL"),
    ("init model prob.jsonl --out new.toml", 78, "prob.jsonl does not exist"),
    ("prepare-run nofile.toml", 78, "nofile.toml does not exist"),
    ("prepare-run my.toml --only policy", 2, "'policy' is not one of"),
    ("tokens new a:b", 78, "'a:b' is not a valid client name"),
    ("serve verifier --nosuch", 2, "No such option"),
    ("bench verifier --scale 0", 2, "greater than or equal to 0.01"),
    ("bench broker --batch 1", 2, "greater than or equal to 32"),
    ("bench chaos --minutes 0", 2, "greater than or equal to 0.1"),
    ("runs rm ../x --yes", 78, "run.name: expected: name of the run"),
    ("runs rm nope --yes", 78, "there is no run nope"),
    ("runs list --config broken.toml", 78, "broken.toml cannot be read: Invalid value"),
    ("report my.toml", 78, "there is no folder my.toml"),
    ("report model", 78, "model is not a run folder"),
    ("report compare model", 78, "a comparison needs two runs or more"),
    ("export model --to y", 78, "model is not a run folder"),
    ("recipes show demoo", 78, "there is no recipe 'demoo': did you mean demo?"),
    ("plan show my.toml --set plan.stages=3", 78, "plan.stages: must be a list (given: 3)"),
    ("self-play nofile.toml", 78, "nofile.toml does not exist"),
    ("self-play my.toml --set self_play.x=1", 78, "unknown key self_play.x"),
    ("sft my.toml --set sft.epochs=0", 78, "sft.epochs: must be greater than or equal to 1 (given: 0)"),
    ("sft import samples.jsonl --out y.jsonl", 78, "no row is an example"),
    ("reward-model pairs problems.jsonl", 2, "Missing argument"),
    ("data import apps apps.jsonl --out x.parquet --tests my.toml", 78, "my.toml is there and is no folder"),
    ("doctor --nosuch", 2, "No such option"),
    ("train my.toml --set run.name=", 78, "run.name: expected: name of the run"),
    ("train my.toml --set run.name=..", 78, "run.name: expected: name of the run"),
    ("train my.toml --set run=5", 78, "run is a section already"),
    ("train my.toml --set run.seed=1.5", 78, "run.seed: must be a valid integer (given: 1.5)"),
    ("train my.toml --set run.sinks=wandb", 78, "run.sinks: must be a list (given: 'wandb')"),
    ("train my.toml --set 'run.sinks=[\"wandbb\"]'", 78, "(given: 'wandbb'): did you mean wandb?"),
    ("train my.toml --set run.sinks.0=wandb", 78, "set it as a whole"),
    ("train my.toml --set run.services=extrenal", 78, "(given: 'extrenal'): did you mean external?"),
    (
        "train my.toml --set problems.held_out_share=nan",
        78,
        "problems.held_out_share: must be less than 1 (given: nan)",
    ),
    ("train my.toml --set 'problems.languages=[\"rust\"]'", 78, "none is in problems.languages, rust"),
    ("train my.toml --set broker.group_size=inf", 78, "broker.group_size: must be a finite number (given: inf)"),
    ("train my.toml --set broker.pipeline_k=0", 78, "broker.pipeline_k: must be greater than or equal to 1"),
    ("train my.toml --set broker.reward.rule=signn", 78, "(given: 'signn'): did you mean sign?"),
    (
        "train my.toml --set broker.reward.rule=callable",
        78,
        "broker.reward: entry_point is for rule callable, which needs it",
    ),
    (
        "train my.toml --set broker.curriculum.name=poools",
        78,
        "potential, priorities (given: 'poools'): did you mean pools?",
    ),
    ("train my.toml --set broker.curriculum=subset", 78, "curriculum is a section already, not a value"),
    ("train my.toml --set broker.redis_url=http://x", 78, "broker.redis_url: http://x cannot be used"),
    ("train my.toml --set broker.redis_url=redis://127.0.0.1:99999", 78, "Port out of range"),
    ("train my.toml --set broker.redis_url_file=nofile", 78, "broker.redis_url_file"),
    (
        "train my.toml --set generation.max_tokens_total=1",
        78,
        "generation.max_tokens_total: must be greater than or equal to 2",
    ),
    (
        "train my.toml --set generation.sampling.top_p=2",
        78,
        "generation.sampling.top_p: must be less than or equal to 1 (given: 2)",
    ),
    ("train my.toml --set generation.sampling.stop=x", 78, "generation.sampling.stop: must be a list"),
    (
        "train my.toml --set generation.sampling.temperature=hot",
        78,
        "generation.sampling.temperature: must be a valid number (given: 'hot')",
    ),
    ("train my.toml --set generation.environment.kind=interpeter", 78, "generation.environment.kind: must be one of"),
    (
        "train my.toml --set generation.environment.turns=2",
        78,
        "generation.environment.turns is a key for kind=feedback",
    ),
    (
        "train my.toml --set generation.environment.prompt_form=nous",
        78,
        "prompt_form: must be 'plain', 'livecodebench'",
    ),
    (
        "train my.toml --set generation.environment.prompt_template=noplace",
        78,
        "generation.environment.prompt_template: expected: text around {prompt}",
    ),
    (
        "train my.toml --set generation.device=cpuu",
        78,
        "generation.device: must be auto, cpu, cuda or cuda:NUMBER (given: 'cpuu')",
    ),
    (
        "train my.toml --set learner.device=gpu",
        78,
        "learner.device: must be auto, cpu, cuda or cuda:NUMBER (given: 'gpu')",
    ),
    ("train my.toml --set generation.dtype=int4", 78, "generation.dtype: must be 'float32' or 'bfloat16'"),
    (
        "train my.toml --set learner.learning_rate=fast",
        78,
        "learner.learning_rate: must be a valid number (given: 'fast')",
    ),
    ("train my.toml --set learner.lora.rank=-4", 78, "learner.lora.rank: must be greater than or equal to 0"),
    ("train my.toml --set learner.objective.name=dapoo", 78, "(given: 'dapoo'): did you mean dapo?"),
    ("train my.toml --set learner.objective.clip_lo=0.2", 78, "did you mean learner.objective.clip_low?"),
    ("train my.toml --set learner.optimizer=sgd", 78, "learner.optimizer: must be 'adamw' or 'muon' (given: 'sgd')"),
    ("train my.toml --set learner.correction.kind=tokenn", 78, "(given: 'tokenn'): did you mean token?"),
    ("train my.toml --set verifier.sandbox.backend=runcs", 78, "(given: 'runcs'): did you mean runsc?"),
    ("train my.toml --set evaluation.samples=0", 78, "evaluation.samples: must be greater than or equal to 1"),
    ("train my.toml --set tls.certificate=nofile.pem", 78, "tls: give certificate, key and ca together"),
    ("train my.toml --set 'plan.stages=[{name=\"a b\"}]'", 78, "plan.stages.0.name: expected: name of the stage"),
    ("train my.toml --set plan.stages.0.run.total_batches=3", 78, "no stage is 0 (stages: none)"),
    ("train my.toml --set recipe.data=3", 78, "recipe.data: must be a list"),
    ("train list.json", 78, "list.json cannot be read: it holds no sections"),
    ("train latin.csv", 78, "latin.csv cannot be read: byte 2 is not UTF-8"),
    ("train model", 78, "model cannot be read: Is a directory"),
    ("data inspect latin.csv", 78, "latin.csv cannot be read: byte 2 is not UTF-8"),
    ("data inspect noprompt.jsonl", 78, "line 1: prompt is missing"),
    ("data inspect unknown.jsonl", 78, "line 1: test: unknown field: did you mean tests?"),
    (
        "data inspect fuzzy.jsonl",
        78,
        'line 1: comparator: not a JSON object such as {"type": "tokens"}; the types are exact, lines',
    ),
    ("data inspect slow.jsonl", 78, "a: limits.wall_time_s: must be at most 300.0"),
    ("data inspect twice.jsonl", 78, "line 2: problem_id 'a' occurs twice"),
    ("data inspect stdio.jsonl", 78, "line 1: tests.type: 'stdio' is none of stdin, call"),
    ("data inspect problems.jsonl --flaky", 78, "no problem has a reference solution"),
    (
        "grade notask.jsonl --problems problems.jsonl",
        1,
        "line 1: none of task_id, question_id, problem_id names the problem",
    ),
    ("grade noanswer.jsonl --problems problems.jsonl", 1, "line 1: it has none of solution, code"),
    ("grade number.jsonl --problems problems.jsonl", 1, "line 1: completion is not text"),
    ("grade both.jsonl --problems problems.jsonl", 1, "line 1: give exactly one of solution and completion"),
    ("grade pythn.jsonl --problems problems.jsonl", 1, "line 1: language: 'pythn' is not installed"),
    ("grade stranger.jsonl --problems problems.jsonl", 1, "line 1: --problems has no problem 'nope'"),
    ("grade null.jsonl --problems problems.jsonl", 1, "line 1: not a JSON object"),
    ("grade cut.jsonl --problems problems.jsonl", 1, "line 1: not JSON"),
    ("grade samples.jsonl", 1, "line 1: tests is missing; for a file of samples give --problems FILE"),
    ("grade nocode.jsonl --problems problems.jsonl", 78, "nocode.jsonl holds no submission"),
    ("grade model", 78, "model cannot be read: Is a directory"),
    ("grade cut.gz --problems problems.jsonl", 78, "it is not a complete compressed file"),
    (
        "grade samples.jsonl --problems problems.jsonl --out nowhere/x.jsonl",
        74,
        "nowhere/x.jsonl cannot be written: No such file or directory",
    ),
    ("grade samples.jsonl --problems problems.jsonl --out model", 78, "model is a folder, not a file"),
    ("grade samples.jsonl --problems problems.jsonl --prefill '<thonk>'", 2, "--prefill '<thonk>' ends with none of"),
    ("eval problems.jsonl --samples samples.jsonl --n 0", 2, "greater than or equal to 1"),
    ("eval problems.jsonl --samples samples.jsonl --profile fast", 2, "'fast' is not one of"),
    ("eval problems.jsonl --samples samples.jsonl --window lcb-v9", 78, "--window 'lcb-v9' is none of lcb-v6"),
    (
        "eval problems.jsonl --samples samples.jsonl --since 2025-02-31",
        78,
        "'2025-02-31' is not a date such as 2024-08-01",
    ),
    (
        "eval problems.jsonl --samples samples.jsonl --since 2025-01-01 --until 2024-01-01",
        78,
        "no date is from 2025-01-01 to 2024-01-01",
    ),
    ("eval problems.jsonl --samples samples.jsonl --out my.toml", 78, "my.toml is a file, not a folder"),
    (
        "eval problems.jsonl --samples stranger.jsonl",
        78,
        "stranger.jsonl, line 1: the problem file has no problem 'nope'",
    ),
    ("eval problems.jsonl --samples model", 78, "model cannot be read: Is a directory"),
    ("data import generic --out y.parquet", 78, "give the files to import"),
    ("data import generic latin.csv --out y.parquet", 78, "latin.csv cannot be read: byte 2 is not UTF-8"),
    ("data import generic problems.csv --column x --out y.parquet", 78, "--column must be FIELD=COLUMN"),
    ("data import generic problems.csv --column prompt=nosuch --out y.parquet", 78, "no row has the column nosuch"),
    ("data import apps s3://b/x --out y.parquet", 78, "s3://b/x is no file: files of this machine"),
    ("data import apps model --out y.parquet", 78, "model cannot be read: Is a directory"),
    ("data import kattis model --out y.parquet", 78, "model holds no problem.yaml"),
    ("data import apps apps.jsonl --out y.parquet --comparator fuzzy", 78, "--comparator: must be 'exact', 'lines'"),
    (
        "data import apps apps.jsonl --out y.parquet --float-tolerance -1",
        78,
        "--float-tolerance: must be greater than or equal to 0",
    ),
    ("data import apps apps.jsonl --out y.parquet --time-limit 0", 78, "--time-limit: must be greater than 0"),
    (
        "data import apps apps.jsonl --out y.parquet --memory-limit lots",
        78,
        "--memory-limit 'lots' is no size such as 4GiB",
    ),
    (
        "data import apps apps.jsonl --out y.parquet --max-tests 0",
        78,
        "--max-tests: must be greater than or equal to 1",
    ),
    ("data import apps apps.jsonl --out y.parquet --after tomorrow", 78, "--after: 'tomorrow' is not a date"),
    (
        "data import apps apps.jsonl --out y.parquet --languages pythn",
        78,
        "--languages: 'pythn' is no language here: did you mean python?",
    ),
    (
        "data import apps apps.jsonl --out y.parquet --prompt nofile.txt",
        78,
        "no file with a template: No such file or directory",
    ),
    ("data export harbour problems.jsonl", 78, "there is no format 'harbour' to export to"),
    ("data export harbor problems.jsonl --out model", 78, "model exists already"),
    ("data filter latin.csv", 78, "latin.csv cannot be read as a recipe: byte 2 is not UTF-8"),
    ("data filter nosuch", 78, "there is no recipe 'nosuch'"),
    ("data filter least.toml", 78, "unknown key at_leest: did you mean at_least?"),
    ("data filter text.toml", 78, "step 1 (num_tests): at_least: must be a valid integer"),
    ("model import . --out y", 78, "cannot be read: Is a directory"),
    ("model import problems.jsonl --out y", 78, "problems.jsonl is no GGUF file"),
]
# Odd files, in the place of problems, samples and configurations.
ODD = [
    ("data inspect odd/loop.jsonl", 78, "loop.jsonl cannot be read: Too many levels of symbolic links"),
    ("data inspect odd/dangling.jsonl", 78, "dangling.jsonl cannot be read: No such file or directory"),
    ("data inspect odd/utf16.jsonl", 78, "utf16.jsonl cannot be read: it is UTF-16 or UTF-32: save it as UTF-8"),
    ("data inspect odd/utf32.jsonl", 78, "utf32.jsonl cannot be read: it is UTF-16 or UTF-32: save it as UTF-8"),
    ("data inspect odd/nul.jsonl", 78, "line 1: not JSON"),
    ("data inspect nan.jsonl", 78, "line 1: limits.wall_time_s: must be a finite number"),
    ("data inspect huge.jsonl", 78, "a: limits.memory_bytes: must be at most"),
    ("data inspect odd/digits.jsonl", 78, "line 1: not JSON: number out of range"),
    ("data inspect odd/deep.jsonl", 78, "deep.jsonl, entry 1: not JSON: its values are nested too deeply"),
    ("data inspect odd/surrogate.jsonl", 78, "line 1: not JSON: unexpected end of hex escape"),
    ("data inspect escape.jsonl", 78, "line 1: ?[31mred: unknown field"),
    ("data inspect odd/blank.jsonl", 78, "blank.jsonl holds no problem"),
    ("data inspect odd/bom.jsonl", 78, "bom.jsonl holds no problem"),
    ("data inspect odd/text.parquet", 78, "text.parquet cannot be read: Parquet magic bytes not found"),
    ("data inspect odd/empty.parquet", 78, "empty.parquet cannot be read: Parquet file size is 0 bytes"),
    ("data inspect odd/dir.jsonl", 78, "dir.jsonl cannot be read: Is a directory"),
    ("data inspect odd/pipe.jsonl", 78, "pipe.jsonl cannot be read: it is a pipe, not a regular file"),
    ("data inspect odd/secret.jsonl", 2, "path 'odd/secret.jsonl' is not readable"),
    ("grade odd/utf16.jsonl --problems problems.jsonl", 78, "it is UTF-16 or UTF-32"),
    ("grade odd/deep.jsonl --problems problems.jsonl", 78, "its values are nested too deeply"),
    ("data inspect odd/keys.jsonl", 78, "line 1: 'tests' is given twice in one JSON object"),
    ("grade odd/keys.jsonl", 1, "line 1: 'tests' is given twice in one JSON object"),
    ("train odd/keys.json", 78, "odd/keys.json cannot be read: 'seed' is given twice in one JSON object"),
    (
        'eval problems.jsonl --url http://127.0.0.1:1/v1 --model m --extra \'{"a": 1, "a": 2}\'',
        2,
        "--extra: 'a' is given twice in one JSON object",
    ),
    ("grade oldcpp.jsonl --problems problems.jsonl", 1, "line 1: language: 'cpp98' is not installed"),
]
# Commands that load torch first.
TYPED_WITH_TORCH = [
    ("serve generation", 78, "runs/run/policy holds no config.json of a model: there is no such folder"),
    ("serve learner", 78, "runs/run/policy does not exist; --config names the run's configuration"),
    ("model import policy.gguf --out y", 78, "policy.gguf cannot be imported: it is cut or damaged"),
    ("bench learner --shape nosuch", 2, "there is no shape nosuch: choose one of tiny"),
    ("sft --model model --data examples.jsonl --name zz --out model", 78, "model exists already"),
    ("sft --model model --data nofile --name zz", 78, "nofile does not exist"),
    ("sft --model notok --data examples.jsonl --name zz", 78, "notok has no tokenizer"),
    ("objectives compare runs/my/batches/1.batch", 78, "is not runs/NAME/batches/NUMBER.batch of a run folder"),
    ("reward-model train model nofile.jsonl", 78, "nofile.jsonl"),
]
NOT_HERE = next(iter(sorted(LANGUAGES - {*installed()})), "cobol")  # this machine may have all languages
ONE = {"type": "stdin", "cases": [{"input": "", "output": ""}]}
# Path, body, status, detail.
SENT: list[tuple[str, object, int, str]] = [
    ("grade", {"language": "pythn", "code": "x", "tests": ONE}, 422, "language: 'pythn' is not installed; these are:"),
    ("grade", {"language": NOT_HERE, "code": "x", "tests": ONE}, 422, f"language: '{NOT_HERE}' is not installed"),
    ("grade", {"language": "c++23", "code": "x", "tests": ONE}, 422, "language: 'c++23' is not installed"),
    ("grade", {"code": "x", "test": ONE}, 422, "tests: Field required"),
    ("grade", "{bad", 422, "body: not JSON"),
    ("grade", {"code": "x", "tests": {"type": "stdin", "cases": []}}, 422, "tests.cases: must have at least 1"),
    ("grade", {"code": "x", "tests": {**ONE, "type": "stdio"}}, 422, "tests.type: 'stdio' is none of stdin, call"),
    ("grade", {"code": "x", "tests": {"type": "math", "answer": "1"}}, 422, "tests.cases: Field required"),
    ("grade", {"tests": ONE}, 422, "body: give exactly one of code and completion"),
    (
        "grade",
        {"code": "x", "tests": {"type": "stdin", "cases": [{"inputs": "", "output": ""}]}},
        422,
        "tests.cases[0].input: Field required",
    ),
    ("grade", {"code": "x", "limits": {"wall_time_s": 9999}, "tests": ONE}, 422, "limits.wall_time_s: must be at most"),
    *(
        ("grade", {"language": name, "code": "x", "tests": ONE}, 422, f"language: '{name}' is not installed")
        for name in ("cpp99", "java99", "python2", "c++0x", "rust2015", "PHP 5", "", " cpp ")
    ),
    ("grade/stream", {"language": "cpp99", "code": "x", "tests": ONE}, 422, "language: 'cpp99' is not installed"),
    ("grade", '{"code": "x", "tests": {"cases": [5], "cases": []}}', 422, "cases: is given twice in one JSON object"),
    ("grade", '{"limits": {"memory_bytes": ' + "9" * 5000 + "}}", 422, "body: not JSON: number out of range"),
    ("grade", '{"limits": {"wall_time_s": 1e400}, "code": "x", "tests": {}}', 422, "must be a finite number"),
    *(("grade", body, 422, "body: not a JSON object") for body in ("[]", "5", "null")),
    ("grade", "", 422, "body: not JSON: EOF while parsing a value at column 0"),
    ("grade", '{"code": "x", "tests": ' + "[" * 3000, 422, "body: not JSON"),
    (
        "grade",
        '{"code": "x", "tests": {}, "limits": {"wall_time_s": NaN}}',
        422,
        "limits.wall_time_s: must be a finite number",
    ),
    *(
        ("grade", {"code": "x", "tests": ONE} | wrong, 422, detail)
        for wrong, detail in (
            (
                {"comparator": "fuzzy"},
                'comparator: not a JSON object such as {"type": "tokens"}; the types are exact, lines',
            ),
            ({"comparator": {"type": "fuzzy"}}, "comparator.type: must be 'exact', 'lines'"),
            ({"comparator": {"float_tolerance": -1}}, "comparator.float_tolerance: must be greater than or equal to 0"),
            ({"limits": 5}, "limits: not a JSON object"),
            ({"limits": {"wall_time_s": 0}}, "limits.wall_time_s: must be greater than 0"),
            ({"limits": {"memory_bytes": "1GB"}}, "limits.memory_bytes: must be a valid integer"),
            ({"limits": {"walltime": 1}}, "limits.walltime: unknown field"),
            ({"language": 5}, "language: must be a text"),
            ({"code": 5}, "code: must be a text"),
            ({"completion": "x"}, "body: give exactly one of code and completion"),
            ({"profile": "fast"}, "profile: must be 'process', 'lcb' or 'code_gen'"),
            ({"prelude": "x"}, "prelude: must be 'none' or 'lcb'"),
            ({"reveal": "yes"}, "reveal: must be 'first_failure' or 'none'"),
            ({"stop_on_first_failure": 1}, "stop_on_first_failure: must be a valid boolean"),
            ({"libraries": "numpy"}, "libraries: must be a list"),
            ({"other_languages": ["pythn"]}, "other_languages: 'pythn' is not installed"),
            ({"nosuch": 1}, "nosuch: unknown field"),
            ({"tests": []}, "tests: a list must hold"),
            ({"tests": "x"}, "tests: a text for tests, arguments or a result must be JSON, not 'x'"),
            ({"tests": {"digest": "abc"}}, "tests.digest: must match"),
            ({"tests": {"inputs": ["1"], "outputs": []}}, "there are 1 inputs and 0 outputs"),
            (
                {"tests": {"type": "call", "entry_point": "a b", "cases": [{"expected": 1}]}},
                "tests.entry_point: must be the name",
            ),
            ({"tests": {"type": "assert", "cases": [5]}}, "tests.cases[0]: must be a text"),
            ({"tests": {"type": "assert", "cases": ["assert ("]}}, "tests.cases[0]: is not python"),
            ({"tests": {"type": "checker", "cases": [{"input": ""}]}}, "tests.checker: Field required"),
            (
                {"tests": {"type": "interactive", "interactor": 5, "cases": [{"input": ""}]}},
                "tests.interactor: not a JSON object",
            ),
        )
    ),
    ("grade/stream", "{bad", 422, "body: not JSON"),
    ("../get_reward", {"query": ["a"], "prompts": [], "labels": []}, 422, "must have the same length"),
    ("../get_reward", {"query": ["a"], "prompts": ["a"], "labels": ["x"]}, 422, "labels[0].tests: is not JSON"),
    ("grad", {}, 404, "Not Found"),
    ("jobs", {}, 501, "this service keeps no jobs"),
]
ANSWERS: dict[str, dict[str, object]] = {
    "noanswer": {},
    "number": {"completion": 5},
    "both": {"completion": "x", "solution": "y"},
    "pythn": {"code": "x", "language": "pythn"},
    "stranger": {"task_id": "nope", "completion": "x"},
    "nocode": {"code_list": []},
    "oldcpp": {"code": "x", "language": "cpp98"},
}
WRONG: dict[str, dict[str, object]] = {
    "unknown": {"test": 3},
    "fuzzy": {"comparator": "fuzzy"},
    "slow": {"limits": {"wall_time_s": 1e9}},
    "stdio": {"tests": {"type": "stdio", "cases": []}},
    "nan": {"limits": {"wall_time_s": float("nan")}},
    "huge": {"limits": {"memory_bytes": 10**400}},
    "escape": {"\x1b[31mred": 1},
}
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
PROCESS = """
import contextlib, io, json, pathlib, shlex, shutil, sys, traceback
from nouscoder.__main__ import main
there = set(pathlib.Path().rglob("*"))
for line in json.load(sys.stdin):
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = ["nouscoder", *shlex.split(line)]
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
    if code == 1:  # answers to some lines: these needed the index
        shutil.rmtree("problems.jsonl.index", ignore_errors=True)
    now = set(pathlib.Path().rglob("*"))
    made = sorted(map(str, now - there))
    for path in made:
        if path.endswith(".index"):  # so that the next line would make it, too
            shutil.rmtree(path)
    there = set(pathlib.Path().rglob("*"))
    print(json.dumps([code, out.getvalue(), made]), file=sys.__stdout__, flush=True)
"""
# Root reads every file; without these capabilities it reads what the modes allow.
AS_MODES_ALLOW = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def make_model(folder: Path, **config: object) -> Path:
    """A folder that looks like a model's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "max_position_embeddings": 4096, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4)
    return folder


def make_home(home: Path) -> None:
    """The files of a newcomer."""
    make_model(home / "model", model_type="qwen3")
    (make_model(home / "notok", model_type="qwen3") / "tokenizer.json").unlink()
    (make_model(home / "nocfg") / "config.json").unlink()
    make_model(home / "badcfg")
    (make_model(home / "bert", model_type="bert") / "model.safetensors").unlink()
    make_model(home / "bert-whole", model_type="bert")
    (make_model(home / "unreadable", model_type="qwen3") / "model.safetensors").chmod(0)
    make_model(home / "locked", model_type="qwen3").chmod(0)
    rows = [{"task_id": f"p{n}", "prompt": "Add.", "tests": {**ONE}} for n in range(40)]
    files: dict[str, list[dict[str, Any]]] = {
        "problems": rows,
        "samples": [{"task_id": "p1", "completion": "x"}],
        "examples": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        "solved": [{"problem_id": row["task_id"], "passed": 8, "sampled": 8} for row in rows],
        "apps": [{"problem_id": 1, "question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}],
        "empty": [],
        "seeds": [{"seed_id": "a", "text": "t"}],
        **{name: [{"task_id": "p1", **answer}] for name, answer in ANSWERS.items()},
        "notask": [{"completion": "x"}],
        **{name: [{"problem_id": "a", "prompt": "p", "tests": ONE} | wrong] for name, wrong in WRONG.items()},
        "twice": [{"problem_id": "a", "prompt": "p", "tests": ONE}] * 2,
        "noprompt": [{"problem_id": "a", "tests": ONE}],
    }
    for name, records in files.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (home / "null.jsonl").write_text("null\n")
    odd = home / "odd"
    odd.mkdir()
    for name in ("loop.jsonl", "dangling.jsonl"):
        (odd / name).symlink_to(name if name == "loop.jsonl" else "nowhere")
    for name in ("utf16", "utf32"):
        (odd / f"{name}.jsonl").write_bytes(json.dumps(rows[0]).encode(name))
    (odd / "nul.jsonl").write_bytes(bytes(100))
    (odd / "digits.jsonl").write_text('{"problem_id": ' + "9" * 5000 + "}\n")
    (odd / "keys.jsonl").write_text('{"problem_id": "a", "prompt": "p", "tests": {}, "tests": {}}\n')
    (odd / "keys.json").write_text('{"run": {"seed": 1, "name": "a", "seed": 2}}\n')
    (odd / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (odd / "surrogate.jsonl").write_text('{"problem_id": "\\ud800", "prompt": "p"}\n')
    (odd / "blank.jsonl").write_bytes(b"\n\r\n  \n")
    (odd / "bom.jsonl").write_bytes(b"\xef\xbb\xbf")
    (odd / "text.parquet").write_text("no parquet")
    (odd / "empty.parquet").touch()
    (odd / "dir.jsonl").mkdir()
    os.mkfifo(odd / "pipe.jsonl")
    (odd / "secret.jsonl").touch(0)
    (home / "cut.jsonl").write_text('{"task_id": "p1", "completion": "x')
    (home / "cut.gz").write_bytes(gzip.compress(b"{}" * 500)[:20])
    (home / "list.json").write_text("[1]")
    (home / "latin.csv").write_bytes("Grüße".encode("latin-1"))
    for name, least in (("least", "at_leest = 3"), ("text", 'at_least = "x"')):
        step = f'[[steps]]\nfilter = "num_tests"\n{least}\n'
        (home / f"{name}.toml").write_text(f'name = "f"\ninputs = ["problems.jsonl"]\n{step}')
    humaneval = dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), "x")
    verl = {"data_source": "x", "prompt": [{"role": "user", "content": "Add."}], "reward_model": {"ground_truth": "{}"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl]), home / "verl.parquet")
    for name, value, indent in (
        ("array.json", [{"Nr": 1, "Aufgabe": "Add.", "Tests": "x"}], None),
        ("humaneval.jsonl", humaneval, None),
        ("verl.json", [verl], 1),
        ("pretty.json", rows[0], 1),
        ("ours.json", rows, 1),
    ):
        (home / name).write_text(json.dumps(value, indent=indent) + "\n")
    (home / "problems.csv").write_text("prompt,tests\nAdd.,x\n")
    (home / "policy.gguf").write_bytes(b"GGUF")
    (home / "broken.toml").write_text("[run]\nname = ")
    (home / "filter.toml").write_text('name = "f"\ninputs = ["problems.jsonl"]\n[[steps]]\nfilter = "num_test"\n')
    (home / "my.toml").write_text(
        '[run]\nname = "r"\nroot = "runs"\n[policy]\npath = "model"\n'
        '[problems]\ntrain = "problems.jsonl"\nheld_out_share = 0.2\n'
        '[broker.curriculum]\nname = "epochs"\n'
    )


def answers_of(home: Path, typed: list[tuple[str, int, str]]) -> dict[str, tuple[int, str]]:
    """What each command line answers: exit code and text. `home` gets the files of a newcomer, and no others."""
    make_home(home)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "TERM": "dumb"}
    with socket.create_server(("127.0.0.1", 0)) as busy:
        lines = [
            line.replace("{busy}", str(busy.getsockname()[1])).replace("{long}", "a" * 120) for line, _, _ in typed
        ]
        command = [*AS_MODES_ALLOW, sys.executable, "-c", PROCESS]
        given = json.dumps(lines)
        done = subprocess.run(
            command, cwd=home, env=environment, input=given, capture_output=True, text=True, timeout=850
        )
    (home / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [(line, made) for (line, _, _), (_, _, made) in zip(typed, found, strict=True) if made]
    return {line: (code, text) for (line, _, _), (code, text, _) in zip(typed, found, strict=True)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return answers_of(tmp_path_factory.mktemp("newcomer"), [*TYPED, *TYPED_TOO, *ODD])


def check(answer: tuple[int, str], code: int, sentence: str) -> None:
    """One sentence, this exit code, no traceback."""
    found, text = answer
    assert "Traceback" not in text
    assert found == code, text
    said = [each for each in text.splitlines() if sentence in each and not each.startswith('{"id"')]
    assert len(said) == 1, text
    # Beside it is a log record, or the usage of the command.
    others = [each for each in text.splitlines() if each and each not in said and not each.startswith("{")]
    assert len(others) <= {1: 3, 2: 6}.get(code, 1), text
    assert code == 2 or re.match(r"[\w ]+: |.*Aborted", said[0]), text


@pytest.mark.timeout(900)  # the first one waits for all; seconds of work, but many imports on a busy machine
@pytest.mark.parametrize(("line", "code", "sentence"), [*TYPED, *TYPED_TOO, *ODD], ids=lambda given: str(given)[:90])
def test_a_wrong_command_gets_one_sentence(
    answers: dict[str, tuple[int, str]], line: str, code: int, sentence: str
) -> None:
    check(answers[line], code, sentence)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_wrong_command_that_loads_torch_gets_one_sentence(tmp_path: Path) -> None:
    answers = answers_of(tmp_path, TYPED_WITH_TORCH)
    for line, code, sentence in TYPED_WITH_TORCH:
        check(answers[line], code, sentence)


def test_a_locale_without_the_characters_of_a_name_is_one_sentence(tmp_path: Path) -> None:
    make_home(tmp_path)
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "nouscoder", "init", make_model(tmp_path / "ü", model_type="qwen3").name]
    done = subprocess.run(
        [*command, "problems.jsonl", "--out", "new.toml"], cwd=tmp_path, env=plain, capture_output=True, timeout=100
    )
    (tmp_path / "locked").chmod(0o700)
    assert (done.returncode, done.stderr.count(b"\n")) == (78, 1), done.stderr[-2000:]
    assert b"set LC_ALL=C.UTF-8" in done.stderr
    assert not (tmp_path / "new.toml").exists()


def test_an_example_without_its_tests_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "examples/grade_a_folder.py", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {tmp_path}/tests.json cannot be read: No such file or directory\n")


async def test_a_wrong_request_gets_one_sentence() -> None:
    """The grading API names the field."""
    registry = CollectorRegistry()
    grader = Grader(FakeSandbox({}), VerifierMetrics(registry), VerifierSection())
    async with AsyncExitStack() as stack:
        app = make_app(grader, registry, DrainState(), 200_000)
        url = "http://" + await start_http(app, "127.0.0.1:0", stack)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        for path, body, status, detail in SENT:
            content = body if isinstance(body, str) else json.dumps(body)
            answer = await http.post(f"/v1/{path}", content=content)
            assert answer.status_code == status, answer.text
            assert detail in answer.json()["detail"], (detail, answer.text)
        assert (await http.get("/v1/grade")).status_code == 405


def test_the_table_has_the_inputs_of_the_walk() -> None:
    assert len({line for line, _, _ in [*TYPED, *TYPED_TOO, *ODD, *TYPED_WITH_TORCH]}) + len(SENT) >= 320
