# make demo   the whole job on a small model on a CPU: prepare, cache, train, validate
# make test   the fast tests; `make test-slow` the rest; `make lint` the linters
# make docs, make completions   write the generated pages and completion scripts anew
# make wheel  the wheel, in dist/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo clean-demo test test-slow lint completions docs wheel

demo: $(INSTALLED) clean-demo
	@set -e; dsplit="$$PWD/$(BIN)/dsplit"; set -x; \
	"$$dsplit" prepare --demo demo; \
	cd demo; \
	"$$dsplit" cache; \
	"$$dsplit" train --from-cache; \
	"$$dsplit" validate
	@find "$$PWD/demo" -name grid.png -exec echo "grid:   {}" \;
	@find "$$PWD/demo" -name report.html -exec echo "report: {}" \;

# Removes only what `make demo` made: a folder of that name without a dsplit.toml is somebody's own.
clean-demo:
	@if [ -e demo ] && [ ! -f demo/dsplit.toml ]; then \
	  echo "./demo was not made by 'make demo'; move it away" >&2; exit 1; fi
	@rm -rf demo

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dsplit

wheel: $(INSTALLED_DEV)
	$(PIP) wheel . --no-deps --no-build-isolation -w dist

# The stamps lie in the environment, so a new one is filled anew; they age when a requirement changes.
$(INSTALLED): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints/cpu.txt -e .
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install -c constraints/cpu.txt -e ".[dev]"
	touch $@

completions docs: $(INSTALLED)
	$(BIN)/python tools/generate.py $@
