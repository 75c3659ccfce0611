# Everything runs in a virtual environment of its own: `make demo` and `make test` need Python, make and a C++
# compiler, nothing else. Files named .stamp-* in it remember what is already done.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pytest, for instance ARGS="-k spmm".
ARGS ?=
# Machines that `make wheel` builds for: x86_64 and aarch64, this one by default.
MACHINES ?=

# Versions that were tested together. PyTorch is installed first and by its exact version, so that no other
# package's wish decides which one comes.
TORCH ?= torch==2.13.0
PINS := torch_geometric==2.8.1 ogb==1.3.6 packaging==26.3 \
	"dgl==2.1.0; python_version < '3.13'" "pandas==3.1.1; python_version >= '3.11'"

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check
CXX_FILES := $(shell find kernels -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help setup cpp demo test test-quick lint format typecheck docs doctor wheel wheel-check clean

help:
	@echo "make demo       train GCN with PyG's own layer and with FastGCNConv, print a table, save demo.png"
	@echo "make test       run the tests; those for GPUs are left out where there is no GPU"
	@echo "make test-quick the same of the core and both plugins, without what takes long"
	@echo "make doctor     show versions, GPUs, what was built, and check every operator"
	@echo "make cpp        build the library for C++ programs as well"
	@echo "make lint       ruff, codespell, import-linter and clang-format, checking only; make format applies them"
	@echo "make typecheck  mypy on the packages"
	@echo "make docs       build the documentation as build/site/index.html (needs DGL, so no Python 3.13)"
	@echo "make wheel      build dist/: an sdist, and wheels for each supported Python (WHEEL_PYTHONS) and MACHINES='x86_64 aarch64'"
	@echo "make wheel-check  install each wheel beside the versions of the support table and try it"
	@echo "make clean      remove builds and caches (the virtual environment stays)"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) ARGS (for pytest), FASTSPARSE_CUDA_ARCHS"

setup: $(VENV)/.stamp-installed

$(VENV)/.stamp-torch:
	@echo "installing $(TORCH) into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) "setuptools>=77" "pybind11>=2.13"
	@touch $@

$(VENV)/.stamp-installed: $(VENV)/.stamp-torch Makefile pyproject.toml setup.py $(CXX_FILES)
	@echo "installing FastSparse, PyG, DGL and what the tests need"
	@FASTSPARSE_PROGRESS=/proc/$$$$/fd/1 \
		$(INSTALL) --no-build-isolation $(PINS) -e ".[pyg,dgl,ogb,bench,docs,test]"
	@$(PY) -c "import fastsparse_core._C as C; print('built:', C.build_info())"
	@touch $@

cpp: setup
	FASTSPARSE_CPP=1 $(PY) setup.py build_ext --inplace

demo: setup
	$(PY) examples/gcn.py --framework pyg --conv both --dataset planted --plot demo.png

test: setup
	$(PY) -m pytest -n auto $(ARGS)

test-quick: setup
	$(PY) -m pytest -n auto -q -m "not slow" tests/core tests/pyg tests/dgl $(ARGS)

doctor: setup
	$(PY) -m fastsparse_core.doctor

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/codespell
	PYTHONPATH=.:kernels $(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/wish.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: setup
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(VENV)/bin/clang-format -i $(CXX_FILES)

typecheck: setup
	$(PY) -m mypy

docs: setup
	$(PY) -m sphinx -b html -d build/site-cache --fail-on-warning --keep-going --quiet docs build/site

wheel:
	.ci/wheel $(MACHINES)

wheel-check:
	.ci/wheel-check

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache kernels/fastsparse_core/_C*.so
	rm -f $(VENV)/.stamp-installed
