PYTHON ?= python3
VENV ?= .venv
# A package index that holds a CPU build of torch, for machines whose default index serves CUDA builds.
TORCH_INDEX ?=
PIP_FLAGS = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
ARGS ?=

.PHONY: setup setup-dev native serve chat test lint clean

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

NATIVE = $(wildcard native/CMakeLists.txt native/*.cpp native/include/* native/src/* native/src/*/*)

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt $(PIP_FLAGS) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/pip install -q -c constraints.txt $(PIP_FLAGS) -e '.[dev]'
	touch $@

# Builds the core again after a change of native/; seconds, where a reinstall takes most of a minute.
native:
	$(VENV)/bin/pip install -q --no-build-isolation --no-deps -e .
	touch $(VENV)/.installed $(VENV)/.installed-dev

serve: setup
	$(VENV)/bin/perilune serve $(ARGS)

chat: setup
	$(VENV)/bin/perilune chat $(ARGS)

lint: setup-dev
	$(VENV)/bin/ruff check perilune train tests
	$(VENV)/bin/ruff format --check perilune train tests
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/pytest -q $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
