# Everything that a developer does here. `make` or `make help` lists it.
#
# By default all of it runs in .venv, which is created on first use and updated when one of its inputs changes.
# With PYTHON=… it runs in that interpreter instead, and nothing is installed.

VENV        := .venv
VENV_MIN    := .venv-min
VENV_2.11   := .venv-2.11
VENV_NEW    := .venv-new
STAMP       := $(VENV)/.installed
STAMP_MIN   := $(VENV_MIN)/.installed
STAMP_2.11  := $(VENV_2.11)/.installed
STAMP_NEW   := $(VENV_NEW)/.installed
PYTHON      ?= $(VENV)/bin/python
PYTEST_ARGS ?=

# Of `make bench`: the arguments of `python -m benchmarks`.
ARGS        ?= host

# Of `make test-rest`: 1/2 is the first half of its tests. Continuous integration runs one after the other.
SHARD       ?= 1/1

# Of `make test-originals`: where it runs, cuda or cpu, and how many cases of each test.
DEVICE      ?= cuda
EACH        ?= 20

# Interpreters to make the environments from, in order of preference.
BASE_PYTHON     ?= python3 python3.14 python3.13 python3.12 python3.11 python3.10
BASE_PYTHON_MIN ?= python3.10 python3.11 python3
BASE_PYTHON_2.11 ?= python3.12 python3.13 python3.11 python3.10
BASE_PYTHON_NEW ?= python3.14 python3.13 python3.12

# An index with other builds of PyTorch, e.g. https://download.pytorch.org/whl/cpu
export TORCH_INDEX_URL ?=

# MkDocs would print its maintainers' news on every build.
export NO_MKDOCS_2_WARNING := 1

ifeq ($(PYTHON),$(VENV)/bin/python)
READY := $(STAMP)
endif

# Hundreds of processes of the tests import the package: they compile it once, whatever the environment wants.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMP) ## Create or update .venv (about 4 GB without CUDA, more with a CUDA PyTorch)

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt cudnn_sdpa/_version.py scripts/make_venv.sh scripts/cuda_extra.py
	@python=$$(scripts/find_python.sh $(BASE_PYTHON)) && scripts/make_venv.sh $(VENV) "$$python"
	@touch $@

.PHONY: demo
demo: $(READY) ## Run samples/quickstart.py: prefill and decode, checked against PyTorch
	$(PYTHON) samples/quickstart.py

.PHONY: test
test: $(READY) ## What needs no GPU: lint, types, documentation, tests; about 6 minutes on two cores
	$(MAKE) --no-print-directory -j 3 typecheck tests

.PHONY: tests
tests: lint docs
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "not gpu" --ignore=tests/gpu --nbmake tests samples $(PYTEST_ARGS)

.PHONY: test-all
test-all: test test-rest ## The same, and the tests and parametrizations that `make test` leaves out

.PHONY: test-rest
test-rest: $(READY) ## What `make test` leaves out; SHARD=1/2 runs the first half of it
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "not gpu" --tests rest --shard $(SHARD) --nbmake tests samples $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## The tests that need an NVIDIA GPU; PYTHON=python3 uses that interpreter as it is
	$(PYTHON) -m pytest -m "gpu and not whole_gpu" tests/gpu $(PYTEST_ARGS); first=$$?; \
	CUDNN_SDPA_GPU_REPORT=$(addsuffix -whole-gpu.json,$(CUDNN_SDPA_GPU_REPORT:.json=)) \
		$(PYTHON) -m pytest -m whole_gpu tests/gpu && exit $$first

.PHONY: test-originals
test-originals: $(READY) ## Tests of FlashAttention, FlashInfer and xFormers on this library; DEVICE=cpu needs no GPU
	$(PYTHON) scripts/originals.py fetch
	$(PYTHON) -m pytest tests/unit/compat/test_originals.py
	$(PYTHON) scripts/originals.py test --device $(DEVICE) --each $(EACH) -- $(PYTEST_ARGS)

.PHONY: test-min
test-min: $(STAMP_MIN) ## Unit tests with the oldest versions supported (downloads several GB of CUDA packages)
	@$(VENV_MIN)/bin/python --version
	@$(VENV_MIN)/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|nvidia-cudnn|typer|rich|platformdirs|numpy) ?'
	$(VENV_MIN)/bin/python -m pytest -n 2 tests/unit tests/contract $(PYTEST_ARGS)

$(STAMP_MIN): pyproject.toml constraints-min.txt
	@echo "PyTorch 2.9.0 for Linux brings CUDA 12 with it: about 7 GB on disk."
	@python=$$(scripts/find_python.sh $(BASE_PYTHON_MIN)) && "$$python" -m venv --clear $(VENV_MIN)
	$(VENV_MIN)/bin/python -m pip install --quiet -c constraints-min.txt -e ".[cu12,test]"
	@touch $@

.PHONY: test-2.11
test-2.11: $(STAMP_2.11) ## Unit tests with PyTorch 2.11, between the two (downloads several GB of CUDA packages)
	@$(VENV_2.11)/bin/python --version
	@$(VENV_2.11)/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|transformers|nvidia-cudnn|typer|rich|platformdirs|numpy)[^ ]* '
	$(VENV_2.11)/bin/python -m pytest -n 2 tests/unit tests/contract $(PYTEST_ARGS)

$(STAMP_2.11): pyproject.toml constraints-2.11.txt
	@echo "PyTorch 2.11.0 for Linux brings CUDA 13 with it: about 6 GB on disk."
	@python=$$(scripts/find_python.sh $(BASE_PYTHON_2.11)) && "$$python" -m venv --clear $(VENV_2.11)
	$(VENV_2.11)/bin/python -m pip install --quiet -c constraints-2.11.txt -e ".[cu13,test,transformers]"
	@touch $@

.PHONY: test-new
test-new: $(STAMP_NEW) ## Unit tests with the newest versions supported (downloads several GB of CUDA packages)
	@$(VENV_NEW)/bin/python --version
	@$(VENV_NEW)/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|transformers|nvidia-cudnn|typer|rich|platformdirs|filelock|numpy)[^ ]* '
	$(VENV_NEW)/bin/python -m pytest -n 2 tests/unit tests/contract $(PYTEST_ARGS)

$(STAMP_NEW): pyproject.toml constraints-new.txt
	@echo "PyTorch 2.15.0 for Linux brings CUDA 13 with it: about 6 GB on disk."
	@python=$$(scripts/find_python.sh $(BASE_PYTHON_NEW)) && "$$python" -m venv --clear $(VENV_NEW)
	$(VENV_NEW)/bin/python -m pip install --quiet -c constraints-new.txt -e ".[cu13,test,transformers]"
	@touch $@

.PHONY: engines
engines: .engines/.unpacked ## The Python files of serving engines, in .engines (downloads 380 MB)

.engines/.unpacked: tests/engines.txt scripts/engines.py | $(READY)
	rm -rf .engines
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest .engines/wheels -r tests/engines.txt
	$(PYTHON) scripts/engines.py unpack .engines/wheels .engines
	rm -rf .engines/wheels
	@touch $@

.PHONY: test-engines
test-engines: engines ## Integrations with serving engines against the engines' own classes
	PYTHONPATH=$(CURDIR)/.engines $(PYTHON) -m pytest -n 2 \
		$$(sed -n 's|^\([a-z]*\).*==.*|tests/unit/integrations/test_\1.py|p' tests/engines.txt) --tests all $(PYTEST_ARGS)

.recipes/.installed: tests/recipes.txt | $(READY)
	rm -rf .recipes
	$(PYTHON) -m pip install --quiet --no-deps --only-binary :all: --target .recipes -r tests/recipes.txt
	@touch $@

.PHONY: test-recipes
test-recipes: .recipes/.installed ## `transformers serve` over HTTP, and Trainer, PEFT and TRL, on the CPU (installs 300 MB)
	PYTHONPATH=$(CURDIR)/.recipes $(PYTHON) -m pytest -n 2 $(addprefix tests/unit/integrations/test_transformers_,autoload.py training.py) \
		$(PYTEST_ARGS)

.PHONY: lint
lint: $(READY) ## Check style and formatting
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

.PHONY: typecheck
typecheck: $(READY) ## Check types (mypy --strict)
	$(PYTHON) -m mypy

.PHONY: format
format: $(READY) ## Fix style and formatting
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

.PHONY: docs
docs: $(READY) ## Build the documentation into site/
	$(PYTHON) -m mkdocs build --strict --quiet

.PHONY: docs-serve
docs-serve: $(READY) ## Serve the documentation at http://127.0.0.1:8000
	$(PYTHON) -m mkdocs serve

.PHONY: notebooks
notebooks: $(READY) ## Execute the notebooks of samples/ on the CPU and store what they print and draw
	$(PYTHON) scripts/notebooks.py

.PHONY: bench
bench: $(READY) ## Run a benchmark, which needs a GPU; ARGS="attention --json x.json" names another than host
	$(PYTHON) -m benchmarks $(ARGS)

.PHONY: clean
clean: ## Remove the environments and everything that was built
	rm -rf $(VENV) $(VENV_MIN) $(VENV_2.11) $(VENV_NEW) .engines .recipes site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks cudnn_sdpa tests samples scripts -type d -name __pycache__ -prune -exec rm -rf {} +
