# make demo   a first run: compile ResNet-50 into 4 stages and train it here, twice
# make test   lint, types and the tests that take no more than minutes
#
# Both make .venv first, with the versions in constraints.txt. They need Python 3.11 or newer
# (PYTHON=... to name one) and nothing else.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $(name))))
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := resnet50_x4
STEPS := 5

# The tests and the demo bring their own parallelism, one process or thread per stage.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint install clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.installed
	$(BIN)/gpipe-compile examples/resnet50.py --stages 4 --microbatches 4 \
		-o $(DEMO) --force
	@echo; echo '== training on this machine, one process =='
	$(BIN)/python $(DEMO)/run.py train --steps $(STEPS)
	@echo; echo '== the same package under torchrun, one process per stage =='
	$(BIN)/torchrun --standalone --nproc-per-node 4 $(DEMO)/run.py train --steps $(STEPS)
	@echo; echo 'The report for people: $(CURDIR)/$(DEMO)/report.html'
	@echo 'The generated code:    $(CURDIR)/$(DEMO)/stage_0.py and its neighbours'

test: lint
	$(BIN)/pytest -n 2 --dist loadfile -m 'not slow'

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist loadfile -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed-dev

# setuptools first and without build isolation, so that the build too uses the pinned versions.
$(VENV)/.installed: constraints.txt pyproject.toml
	@test -n '$(PYTHON)' || { \
		echo 'Python 3.11 or newer with its venv module is needed (PYTHON=/path/to/python);'; \
		echo 'on Debian and Ubuntu: apt install python3 python3-venv'; exit 2; }
	@echo 'installing into $(VENV) (PyTorch is large: this may take minutes)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
