# Two commands on a fresh Linux machine with Python >= 3.11 and make:
#   make demo   set up .venv and run the whole loop on the embedded models; writes out/report.html
#   make test   set up .venv and run lint, types, the import contracts and all tests
#
# torch from pip's default index carries CUDA: gigabytes that a machine without an NVIDIA GPU has no use for. There, give
# the URL of a package index with CPU builds of torch: make demo TORCH_INDEX=https://...
TORCH_INDEX ?=
EXTRAS := serve,eval,train,dev
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test setup clean

demo: $(INSTALLED)
	$(BIN)/looped demo

# One thread per worker: tests are many small matrices, and the workers share the cores.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

setup: $(INSTALLED)

# torch comes alone from its own index (that index need not carry the pinned versions of the rest).
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "looped needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || \
	    { echo "$(PYTHON) -m venv failed: install the venv package of your distribution (python3-venv)" >&2; exit 1; }
	@test -n "$(TORCH_INDEX)" || command -v nvidia-smi >/dev/null || \
	    echo "no NVIDIA GPU seen: TORCH_INDEX (see README) can spare the download of CUDA libraries" >&2
	$(if $(TORCH_INDEX),$(BIN)/pip install --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(BIN)/pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
