# Everything from an empty machine: `make demo` answers a question twice, `make test` runs the whole suite.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types check peers bench clean

$(BIN)/ostinato: pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip  # from 24.1 on it says how far a download is
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(BIN)/ostinato
	@echo "Installing the test tools …"
	@$(PIP) -e '.[test,lint]'
	@touch $@

demo: $(BIN)/ostinato
	@$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint types test

# g++ 12 drops part of the tile configuration in llama.cpp's AMX code as a dead store: built without this flag it
# dies at the first prompt on a processor with AMX.
peers: $(VENV)/.test
	CFLAGS=-fno-tree-dse CXXFLAGS=-fno-tree-dse $(PIP) -e '.[peers]'

bench: peers
	$(BIN)/python benchmarks/peers.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
