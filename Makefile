# `make demo`, `make test` and, with a GPU and a day, `make paper`. Each makes a .venv of its own first.
PYTHON ?= python3
BIN := .venv/bin

DATA ?= data

.PHONY: demo paper test slow check docs oldest install clean

demo: .venv/installed
	@rm -f out/demo/watch.csv
	$(BIN)/cao suite demo-conditioning --jobs 2 --logs out/demo
	$(BIN)/cao suite demo-fit --jobs 2 --logs out/demo
	$(BIN)/cao suite demo --jobs 2 --logs out/demo
	$(BIN)/python examples/largest_safe_rate.py --epochs 5 --out out/demo/watch.png --log out/demo/watch.csv
	@$(BIN)/cao report out/demo --out out/report > /dev/null
	@echo
	@echo "Open $(CURDIR)/out/report/index.html"
	@echo "Does the paper hold? A matrix of claims, and curves of a badly scaled regression, where curvature pays, and of"
	@echo "digits, where it does not. Below: an equation solved by a network, and a rate that rises to the edge of stability."

# The paper's experiments at its own size: data, suites and report, one run on each GPU at a time. The same command goes
# on where it stopped. `make paper DRY_RUN=1` only says what there is to do and how long it takes here, as far as that
# is known. For a torch that lies elsewhere: make paper BIN=/path/to/its/bin, with this package installed there.
paper: $(if $(filter .venv/bin,$(BIN)),.venv/installed)
ifdef DRY_RUN
	for suite in paper sensitivity; do $(BIN)/cao suite $$suite --dry-run --data-dir $(DATA) || exit; done
else
	for name in cifar10 cifar100; do $(BIN)/cao data $$name --data-dir $(DATA) || exit; done
	jobs=$$($(BIN)/python -c 'import torch; print(max(1, torch.cuda.device_count()))') && \
	for suite in paper sensitivity; do $(BIN)/cao suite $$suite --jobs $$jobs --data-dir $(DATA) || exit; done
	$(BIN)/cao report logs --out report
endif

# A crashed or hung test ends the run with its name: see [tool.pytest.ini_options] in pyproject.toml.
# Two tests run side by side, so each gets one thread of two cores; OMP_NUM_THREADS=2 make test gives each two.
test slow: export OMP_NUM_THREADS ?= 1
test: check
	$(BIN)/pytest -m "not slow"

# Runs that are killed and started again, suites on a cluster, the whole table of the theory: two minutes more.
slow: .venv/installed
	$(BIN)/pytest -m slow

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as a site, in out/site/index.html; warnings are errors, and no network is needed.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/mkdocs build --quiet
	@echo "open out/site/index.html; to search, serve it: python3 -m http.server --directory out/site"

# The library's tests on the oldest torch that it allows, which is fetched for the purpose.
oldest:
	scripts/test_with_torch

install: .venv/installed

# torch comes first and pinned: any other request for it would pull gigabytes of CUDA packages.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist
