PYTHON ?= python3
VENV ?= .venv
# A package index that holds a CPU build of torch, for machines whose default index serves CUDA builds.
TORCH_INDEX ?=
PIP_FLAGS = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
ARGS ?=

.PHONY: setup setup-dev native native-check serve chat test lint clean

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

NATIVE = $(wildcard native/CMakeLists.txt native/*.cpp native/include/* native/include/*/* native/src/* native/src/*/*)

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

# The core without Python: its pool and kernels under sanitizers, and those of AVX-512 by SIMDe where that is installed.
native-check:
	cmake -S native -B build/check -DPERILUNE_SANITIZE=address,undefined $(CHECK_FLAGS) \
		-DPERILUNE_EMULATE_AVX512=$(if $(wildcard /usr/include/simde/x86/avx512.h),ON,OFF)
	cmake --build build/check
	build/check/tests/native_tests $(ARGS)
	cmake -S native -B build/check-threads -DPERILUNE_SANITIZE=thread $(CHECK_FLAGS)
	cmake --build build/check-threads
	TSAN_OPTIONS=die_after_fork=0 build/check-threads/tests/native_tests $(ARGS)

CHECK_FLAGS = -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPERILUNE_TESTS=ON -DPERILUNE_BINDINGS=OFF

serve: setup
	$(VENV)/bin/perilune serve $(ARGS)

chat: setup
	$(VENV)/bin/perilune chat $(ARGS)

lint: setup-dev
	$(VENV)/bin/ruff check perilune train tests
	$(VENV)/bin/ruff format --check perilune train tests
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/pytest -q -n auto --maxprocesses 4 --dist loadfile $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
