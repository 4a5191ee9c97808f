# `make demo` and `make test` do all of their own set-up; see scripts/setup.
PY := .venv/bin/python

SEEDS := 1-200
MINUTES := 60
SCALE := 1

.PHONY: demo test test-slow sim chaos lint docs check-compiled check-package bench bench-peers setup clean

setup:
	@scripts/setup

# CONSOLE=1 ends with the web console on a cluster that has something to look at.
demo: setup
	@$(PY) examples/demo.py

# A file of tests runs as a whole in one of the processes: servers and Spark sessions that its tests share start once.
test: setup
	$(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: setup
	$(PY) -m pytest -m slow --timeout 1800

# A whole cluster in a simulation that the seed alone determines: SEEDS=7 or SEEDS=1-20000.
sim: setup
	@$(PY) -m tests.sim $(SEEDS)

# Real faults against real processes, resumed where the last run ended: ROWS="1 7", MINUTES=10, SCALE=0.01, FRESH=1.
chaos: setup
	@$(PY) -m tests.chaos $(ROWS) --minutes $(MINUTES) --scale $(SCALE) $(if $(FRESH),--fresh)
	@$(PY) -m tests.chaos.scorecard

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The C with all warnings as errors, and its fuzzer under AddressSanitizer and UBSan.
check-compiled: setup
	scripts/check-compiled 30

# The sdist and the wheel of a release, installed into empty environments and used there.
check-package: setup
	scripts/check-package

# The pages as a site in build/site; open its index.html, no server is needed.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

# QUICK=1 for a run of a few minutes that shows that everything works.
bench:
	@scripts/setup bench
	$(PY) -m bench

# NATS, Redis and RabbitMQ with their usual clients, to be measured beside ours by `make bench`.
bench-peers:
	@scripts/bench-peers
	@scripts/setup peers

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
