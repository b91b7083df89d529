# make demo   set up and watch the pipeline answer
# make test   set up and run every test
# make soak   run the tests that gain by it at their full length, which takes long
# make soak HOURS=6, MINUTES=10    run a whole deployment under mixed load for so long (docs/soak.md)
# make simulate SEEDS=0..999, SEED=17 TRACE=1   run the engine in simulated time (docs/simulation.md)
# make check  format, lint, types, layers, links and anchors of the documents
# make site   write the documents as a site with search to build/site
# make docs   write the tables of docs/models.md from a run of the parity tests
# make proto  write kserve/inference.binpb from inference.proto
# make bench  measure the engine beside Transformers, and what each part costs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
USED := $(VENV)/.usable
STAMP := $(VENV)/.installed

# Four keep two cores busy. A file's tests stay together: they share servers and pipelines. The
# longest files come first (tests/conftest.py).
PARALLEL ?= --numprocesses 4 --dist loadfile --no-loadscope-reorder

export HF_HUB_OFFLINE := 1
# Images for containers tend to set it; without bytecode every process compiles us anew.
unexport PYTHONDONTWRITEBYTECODE
# An advertisement at each build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-fast soak simulate check site docs proto bench clean

demo: $(USED)
	$(BIN)/nano-inference demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --durations=20

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

ifneq ($(HOURS)$(MINUTES),)
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py $(if $(HOURS),--hours $(HOURS)) $(if $(MINUTES),--minutes $(MINUTES)) --json soak.json
else
soak: $(STAMP)
	$(BIN)/python -m pytest --soak -m soak -o faulthandler_timeout=7200
endif

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(TRACE),--trace)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror stages/executor/runner/kernels/*.[ch]
	$(BIN)/mkdocs build

site: $(STAMP)
	$(BIN)/mkdocs build

docs: $(STAMP)
	$(BIN)/python -m pytest tests/stages/executor/test_parity.py --write-docs

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I kserve --descriptor_set_out=kserve/inference.binpb kserve/inference.proto

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py --peers transformers,generate_batch --repeat 3
	$(BIN)/python benchmarks/bus.py
	$(BIN)/python benchmarks/cache.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/deterministic.py
	$(BIN)/python benchmarks/fairness_cost.py
	$(BIN)/python benchmarks/fairness_live.py
	$(BIN)/python benchmarks/telemetry.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache

# A virtual environment of our own, renewed when what it holds is changed: what users need, and then
# what tests and checks need. Python compiles what is imported; all of it would take as long again.
INSTALL = $(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable

$(USED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "Python 3.11 to 3.13 is needed, this is %d.%d; set PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "# installing into $(VENV): torch and some eighty packages, which takes two to five minutes"
	$(INSTALL) ".[all]"
	touch $@

$(STAMP): $(USED)
	@echo "# installing what the tests need, which takes a minute or two"
	$(INSTALL) ".[all,test,check]" --quiet
	touch $@
