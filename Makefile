# Two commands matter: `make demo` and `make test`. Each sets itself up the first time and is quick afterwards.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Not among the constraints, for a PyTorch with CUDA brings one of its own.
TRITON := triton==3.7.1
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

# Ray in an environment of its own, which sees the other one.
RAY_TESTS := PYTHONPATH=src:tests RAY_AUTH_MODE=token RAY_AUTH_TOKEN=of-the-tests $(VENV)-ray/bin/python -m pytest -q -m "not slow" -W ignore::pytest.PytestUnraisableExceptionWarning

.PHONY: demo test slow kernels crash cluster crash-cluster versions examples cookbook lint format coverage docs dist-check clean help

help:
	@echo "make demo        watch a small model learn to add, on this machine"
	@echo "make test        run the tests"
	@echo "make slow        run the slow tests"
	@echo "make kernels     run the GPU's kernels without a GPU, by Triton's interpreter, and compile them for some"
	@echo "make crash       kill the server again and again while it works, and cut its power"
	@echo "make cluster     test a fleet on a small cluster of Ray; kill its workers and a raylet"
	@echo "make crash-cluster  the same with 200 kills of workers, 8 of raylets and 20 of heads"
	@echo "make versions    run the loop with eleven versions of the official client"
	@echo "make cookbook    run the tests and loops of two tinker-cookbooks with the official client and with tinkex"
	@echo "make examples    run all examples, each of which proves what it shows"
	@echo "make lint        linter, formatter in check mode, strict types, layers"
	@echo "make format      format the code"
	@echo "make coverage    list every numbered requirement and the tests that show it"
	@echo "make docs        build the documentation site into site/; a link that leads nowhere ends it"
	@echo "make dist-check  build wheel and sdist, install them into empty environments, try them"

demo: $(VENV)/.local
	@$(BIN)/tinkex demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 -m "not slow" $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

ifeq ($(shell uname -s),Linux)
kernels: $(VENV)/.test $(VENV)-triton/.triton
	PYTHONPATH=$(VENV)-triton TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 3 tests/engine/test_kernels*.py $(ARGS)
	PYTHONPATH=$(VENV)-triton $(BIN)/python tools/kernels.py
else
kernels:
	@echo "Triton is to be had for Linux alone: the kernels are left out"
endif

crash: $(VENV)/.test
	$(BIN)/python -m pytest -q tests/test_crashes.py tests/test_power_loss.py $(ARGS)

ifeq ($(shell uname -s),Linux)
cluster: $(VENV)/.test $(VENV)-ray/.ray
	$(RAY_TESTS) tests/test_ray_cluster.py $(ARGS)

crash-cluster: $(VENV)/.test $(VENV)-ray/.ray
	CLUSTER_KILLS=200 CLUSTER_RAYLETS=8 CLUSTER_HEADS=20 $(RAY_TESTS) -s tests/test_ray_cluster.py $(ARGS)
else
cluster crash-cluster:
	@echo "the tests of a cluster run on Linux"
endif

versions: $(VENV)/.test
	$(BIN)/python tools/clients.py
	$(BIN)/python -m pytest -n 2 tests/test_versions.py $(ARGS)

cookbook: | $(BIN)/python
	$(BIN)/python tools/cookbook.py $(ARGS)

examples: $(VENV)/.test
	$(BIN)/python examples/run_all.py $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/coverage.py --missing C D 24 W 1 4 > /dev/null

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(VENV)/.test
	@$(BIN)/python tools/coverage.py $(ARGS)

docs: $(VENV)-docs/.docs
	$(VENV)-docs/bin/python tools/site.py $(ARGS)

dist-check: $(VENV)/.test
	$(BIN)/python tools/dist_check.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.local: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up (once): installing tinkex and PyTorch into $(VENV) …"
	$(PIP) --editable '.[local]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.official
	@echo "setting up (once): installing tinkex and the test tools into $(VENV) …"
	$(PIP) --editable '.[local,test,lint]'
	command -v cc > /dev/null || $(PIP) --editable '.[native]' # a C compiler, for what samples on a CPU
	@touch $@ $(VENV)/.local

$(VENV)/.official: constraints.txt tools/clients.py | $(BIN)/python
	$(PIP) tinker
	$(BIN)/python tools/clients.py --quick
	@touch $@

$(VENV)-triton/.triton: Makefile | $(BIN)/python
	@echo "setting up (once): Triton, into $(VENV)-triton …"
	$(BIN)/python -m pip --disable-pip-version-check install -qq --upgrade --target $(VENV)-triton $(TRITON)
	@touch $@

$(VENV)-ray/.ray: pyproject.toml constraints.txt | $(VENV)/.test
	@echo "setting up (once): Ray, into $(VENV)-ray …"
	$(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt ray
	$(VENV)-ray/bin/python -c "import site; open(site.getsitepackages()[0] + '/tinkex-tests.pth', 'w').write('import site; site.addsitedir(\"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')\")\n')"
	@touch $@

$(VENV)-docs/.docs: pyproject.toml constraints.txt
	@echo "setting up (once): installing tinkex and what builds its documentation into $(VENV)-docs …"
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-ray $(VENV)-docs $(VENV)-triton .venv-clients .venv-cookbook-* dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
