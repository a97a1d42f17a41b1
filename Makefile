# Each target sets up all it needs: Python 3.11+, make and a C compiler are enough.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
SECONDS ?= 600
UV := $(firstword $(wildcard .venv/bin/uv) uv)

.PHONY: demo test test-heavy test-soak test-cluster test-documents fuzz check format bench proto lock images clean real-input

demo: .venv/demo.ready
	$(BIN)/nouscoder demo --seed $(SEED)

# A process a core; the tests of a file stay together, for some share what takes long to start.
test: .venv/dev.ready
	$(BIN)/pytest -n auto --dist loadfile

# Minutes long: each process killed in turn, an exact resume, the demo.
test-heavy: .venv/dev.ready
	$(BIN)/pytest -m heavy

# Up to an hour: more seeds of the demo; the attack corpus through gVisor, and again and again at eight at once.
test-soak: .venv/dev.ready
	deploy/build-runsc
	$(BIN)/nouscoder prepare
	$(BIN)/pytest -m soak

# On a real cluster: that of KUBECONFIG, else the one that ../shared/cluster brings up here.
test-cluster: .venv/dev.ready
	deploy/test-cluster

# The commands of docs/operating.md, there too.
test-documents: .venv/dev.ready
	deploy/test-cluster documents

# Longer than the tests do, split over all fuzzers; what they learn is kept in .fuzz/: make fuzz SECONDS=3600
fuzz: .venv/dev.ready
	NOUSCODER_FUZZ_SECONDS=$(SECONDS) $(BIN)/pytest -s tests/fuzz -k "fuzz_target or rest_api"

check: .venv/dev.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	deploy/proto-stubs check
	$(CC) -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror -std=c11 -D_GNU_SOURCE $(wildcard services/nouscoder/verifier/harness/init/*.c)

format: .venv/dev.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/dev.ready
	$(BIN)/nouscoder bench verifier
	$(BIN)/nouscoder bench broker

real-input: .venv/dev.ready
	$(BIN)/python tests/e2e/test_real_problems.py

proto: .venv/dev.ready
	deploy/proto-stubs write

# Pins every dependency with hashes and without addresses. What an image holds is what the tests ran with (dev.txt).
PINS := --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11
COMPILE = $(UV) pip compile -q $(PINS)
lock: .venv/dev.ready
	$(COMPILE) pyproject.toml --extra dev -o requirements/dev.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra demo -o requirements/demo.txt
	$(COMPILE) pyproject.toml -c requirements/dev.txt --extra verifier --extra math --extra tracing --extra cluster -o requirements/verifier.txt
	for service in broker generation learner; do $(COMPILE) pyproject.toml -c requirements/dev.txt --extra $$service -o requirements/$$service.txt || exit; done
	for group in sandbox build; do $(COMPILE) -c requirements/dev.txt --group $$group -o requirements/$$group.txt || exit; done

# The images of the five kinds of pods, by whatever builds images here: make images ACCELERATOR=cpu
ACCELERATOR ?= cuda
images:
	deploy/images/build --accelerator $(ACCELERATOR)

.venv/%.ready: requirements/%.txt pyproject.toml deploy/setup-venv
	PYTHON=$(PYTHON) deploy/setup-venv $*
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
