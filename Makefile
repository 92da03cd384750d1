# Two commands set up everything on a fresh clone:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The demo and the tests need one framework build; any torch >= 2.6 works for your own jobs.
TORCH  ?= torch==2.13.0

.PHONY: demo test test-demo test-faults test-chromium test-jax test-trl test-trl-previous test-ray test-frameworks test-etcd test-helm check bench soak storms mutants protos docs clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,check]'
	@touch $@

demo: $(VENV)/.installed          ## run the main job: two RL jobs alone, then sharing one accelerator
	$(BIN)/coslice demo

test: $(VENV)/.installed          ## all tests: core, fakes, real processes
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not chromium and not jax and not trl and not ray and not frameworks and not faults and not cuda and not etcd and not helm and not demo' tests

test-demo: $(VENV)/.installed     ## the demo interrupted in further ways, and with memory for both jobs or for none
	$(BIN)/pytest -m demo tests/demo

test-faults: $(VENV)/.installed   ## long campaigns of kills at random instants, with a short soak
	$(BIN)/pytest -m faults tests/faults tests/soak

test-cuda: $(VENV)/.installed     ## long runs on the fake CUDA driver: 200 hand-overs that flake, killed agents
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,cuda]'
	$(BIN)/pytest -m cuda tests/agent

test-etcd: $(VENV)/.installed     ## the store in a real etcd, several orchestrators, leaders killed and paused
	command -v etcd >/dev/null || $$([ "$$(id -u)" = 0 ] || echo sudo) apt-get install -y -q --no-install-recommends etcd-server
	$(BIN)/pytest -m etcd tests

test-helm: $(VENV)/.installed     ## the chart with the real helm, against the schemas of Kubernetes; units and images
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,helm]'
	command -v helm >/dev/null || $(BIN)/python tools/helm.py
	$(BIN)/pytest -m helm tests/deploy

test-chromium: $(VENV)/.installed ## replay page and dashboard in a real browser (needs chromium and chromedriver)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[chromium]'
	$(BIN)/pytest -m chromium tests

test-jax: $(VENV)/.installed      ## the adapter for JAX arrays on JAX's CPU devices
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[jax]'
	$(BIN)/pytest -m jax tests/workload

test-trl: $(VENV)/.installed      ## real TRL jobs that share an accelerator
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,trl]'
	$(BIN)/pytest -m trl tests/integrations

# The previous major line needs an older transformers, and so an environment of its own.
TRL_PREVIOUS ?= 'trl==0.24.0' 'transformers==4.57.6'
build/trl-previous/.installed: pyproject.toml
	$(PYTHON) -m venv build/trl-previous
	build/trl-previous/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	build/trl-previous/bin/pip install --quiet --disable-pip-version-check -e '.[test]' $(TRL_PREVIOUS)
	@touch $@

test-trl-previous: build/trl-previous/.installed  ## the same tests on TRL's previous major line
	build/trl-previous/bin/pytest -m trl tests/integrations

test-ray: $(VENV)/.installed      ## real Ray: tasks, actors, two RL jobs on two groups
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,ray]'
	$(BIN)/pytest -m ray tests/integrations

build/frameworks/.installed: tests/integrations/frameworks.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target build/frameworks -r $<
	@touch $@

test-frameworks: $(VENV)/.installed build/frameworks/.installed  ## the own loops of verl and SkyRL, without accelerators; the methods that adapters wrap elsewhere
	PYTHONPATH="$(CURDIR)/build/frameworks" $(BIN)/pytest -m frameworks tests/integrations

check: $(VENV)/.installed         ## ruff, mypy strict, import contracts
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed         ## latencies, as ratios to an echo of the same run
	$(BIN)/coslice bench handoff --nodes 1
	$(BIN)/coslice bench handoff --nodes 8
	$(BIN)/coslice bench driver

MINUTES ?= 10
soak: $(VENV)/.installed          ## a live cluster under random kills and stops for MINUTES, judged by witnesses
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES)

storms: $(VENV)/.installed        ## restart with five waiters, a hung agent among 50 groups, 10,000 cancels
	$(BIN)/python tools/storms.py --json build/storms.json

mutants: $(VENV)/.installed       ## put classic defects back: chaos or exploration alone must find each
	$(BIN)/python tools/mutants.py

protos:                           ## regenerate src/coslice/wire/v1 with a pinned compiler
	test -d .venv-protos || $(PYTHON) -m venv .venv-protos
	.venv-protos/bin/pip install --quiet 'grpcio-tools==1.76.0' 'mypy-protobuf==3.7.0' 'setuptools<81'
	PATH="$(CURDIR)/.venv-protos/bin:$$PATH" .venv-protos/bin/python tools/protos.py

docs: $(VENV)/.installed          ## regenerate docs/state-machine.md from the core
	$(BIN)/python tools/state_machine.py > docs/state-machine.md

clean:
	rm -rf $(VENV) .venv-protos build .pytest_cache .mypy_cache .ruff_cache
