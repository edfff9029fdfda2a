# Each command sets up its own .venv first; nothing else needs to be installed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: test slow compat style benchmarks clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

test: $(READY)  ## the tests, two minutes on two cores once it is set up
	$(BIN)/python -m pytest -n 2

slow: $(READY)  ## the tests that take longer, or need real weights and further packages
	$(BIN)/pip install --quiet -c constraints.txt -e '.[slow]'
	$(BIN)/python -m pytest -m slow

compat: $(READY)  ## published checkpoints under every supported transformers
	$(BIN)/python -m tests.compat

style: $(READY)  ## checks style and types, and fixes what can be fixed
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/mypy

benchmarks: $(READY)  ## measures again, about half an hour alone on the machine
	$(BIN)/python -W ignore -m benchmarks.training_memory
	$(BIN)/python -W ignore -m benchmarks.training_time
	$(BIN)/python -W ignore -m benchmarks.generation
	$(BIN)/python -W ignore -m benchmarks.copy_distance
	$(BIN)/python -W ignore -m benchmarks.block_recurrent
	$(BIN)/python -W ignore -m benchmarks.recurrent_roberta
	$(BIN)/python -W ignore -m benchmarks.sru_bert
	$(BIN)/python -W ignore -m benchmarks.pipeline
	$(BIN)/python -W ignore -m benchmarks.evaluation
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf .venv .compat
