# Two commands do everything on a fresh machine: `make report` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The environment is current when this file is newer than the pins and the package's own requirements.
STAMP := $(VENV)/.current

.PHONY: report test test-full check lab notebooks environment browser clean

report: $(STAMP)  ## run the whole workbook on the bundled digits and print the report's path
	@$(BIN)/dualtrack run

test: $(STAMP) browser  ## tests and notebooks
	@$(BIN)/python -m pytest -q -m "not full"

test-full: $(STAMP) browser  ## what `make test` leaves out because it is slower
	@$(BIN)/python -m pytest -q -m full

check: $(STAMP)  ## format, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

lab: $(STAMP)  ## explore the notebooks
	@$(BIN)/python -m ipykernel install --prefix $(VENV) --name python3 --display-name "dualtrack" >/dev/null
	@$(BIN)/jupyter lab notebooks

environment: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "expected Python 3.11 or newer, got %d.%d; set PYTHON=..." % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned environment into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# The page is tested in a real browser: the system's Chromium, else Debian's package where we may install it, else playwright's own build.
browser: $(STAMP)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	 || (command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null) \
	 || $(BIN)/playwright install chromium

clean:  ## remove interactive runs and caches; runs under reports/ that are complete stay
	@$(BIN)/dualtrack clean

notebooks: $(STAMP)  ## run each notebook on its small defaults and store its outputs; look at the difference before committing
	@for notebook in notebooks/[0-4]_*.ipynb; do $(BIN)/dualtrack store-outputs $$notebook || exit 1; done
