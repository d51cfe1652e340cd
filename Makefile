# Everything runs in .venv, which is made where it is missing and filled anew when the pins or pyproject.toml change.

PYTHON ?= python3
SRC ?=
SPLIT ?= 0.2
DIST ?= dist
JOBS ?=
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP) -c constraints.txt --build-constraint constraints.txt
# The longest come first, and `gpu --quick` (make gpu DRY=1) runs those that are left out.
BENCHES := gpu doctor $(filter-out gpu doctor compile device input loop optim precision time_to_accuracy,$(patsubst bench/%.py,%,$(filter-out bench/_%,$(wildcard bench/*.py))))
NAME := $(if $(SRC),images,digits)

ALONE := tests/multihost tests/data/test_loader_memory.py

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo loop-demo native test fuzz check lint docs benches decks gpu gpu-kit peers wheel refresh clean

help: ## print this list
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

# Debian 12 brings pip 23.0; dependency groups need 25.1.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Filling $(VENV): the package and what it runs on (minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt pip
	$(INSTALL) -e '.[demo,tensorboard]' -C wheel.cmake=false
	touch $@

$(VENV)/.tools: $(VENV)/.base
	@echo "Filling $(VENV): tests, linters, docs"
	$(INSTALL) --group test --group lint --group docs
	touch $@

native: $(VENV)/.native ## the native core, built in place where its source has changed

# Where there is no cmake, pip brings one for the time of the build. The lock: two makes at once build one after another.
$(VENV)/.native: $(wildcard native/*) | $(VENV)/.base
	@echo "Building the native core"
	@mkdir -p build; exec 9> build/native.lock; flock 9; \
	if command -v cmake >/dev/null; then \
	  cmake -S native -B build/native -D HEADWAY_STRICT=$${CI:-OFF} >/dev/null; \
	  cmake --build build/native -j "$$(nproc)" >/dev/null; cmake --install build/native >/dev/null; \
	else $(INSTALL) --no-deps -e .; fi
	touch $@

demo: $(VENV)/.native ## the main job on real images: pack, train, report (SRC=FOLDER for your own; SPLIT= where it holds train/ and eval/)
	rm -rf demo
	mkdir demo
ifeq ($(SRC),)
	$(BIN)/python examples/digits_folder.py demo/digits
else
	ln -s "$$(realpath -e "$(SRC)")" demo/images
endif
	$(BIN)/headway init demo/$(NAME) --out demo/$(NAME).yaml
	$(BIN)/headway pack demo/$(NAME) demo/$(NAME).packed $(if $(SPLIT),--split $(SPLIT))
	$(BIN)/headway train demo/$(NAME).yaml --run demo/run
	$(BIN)/headway evaluate demo/run
	$(BIN)/headway report demo/run

loop-demo: $(VENV)/.tools $(VENV)/.native ## a loop on digits: train, mine, labels by POST, train again, gate, export; one to three minutes
	rm -rf loop-demo
	OMP_NUM_THREADS=1 $(BIN)/python examples/loop_demo.py loop-demo

# One thread: the networks are tiny, and threads that wait for each other on busy cores take longer.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Three at once on two cores: a test waits for about a fifth of its time. Those of `check` wait for a third: four at once.
PARALLEL = $(PYTEST) -n $(or $(JOBS),$(1)) --dist worksteal
# In CI what fails runs once more, alone, and the log names it: one unreliable test hides nothing else, and stops nothing.
ONCE_MORE := || { test $$? = 1 -a "$${CI:-}" = true && echo "Once more, alone. What passes now is unreliable: mend it." && \
  $(PYTEST) --last-failed --last-failed-no-failures none --maxfail 3 -rA --tb short; }

test: $(VENV)/.tools $(VENV)/.native ## one case of every kind, some five minutes on 2 cores (JOBS=3 at once)
	$(call PARALLEL,3) --hypothesis-profile=quick -m "not check and not peers" $(ONCE_MORE)

fuzz: $(VENV)/.tools $(VENV)/.native ## hostile inputs under sanitizers (TARGET=decode COUNT= SECONDS=600 SEED=0; targets: tests/fuzz/campaign.py)
	$(BIN)/python -m tests.fuzz.campaign $(or $(TARGET),decode) $(or $(COUNT),0) $(or $(SECONDS),$(if $(COUNT),0,600)) $(or $(SEED),0)

check: lint docs peers benches ## everything that takes longer, some 25 minutes: linters, docs, benches, peers, long tests
	$(call PARALLEL,4) -m "check or peers or hypothesis" $(ALONE:%=--ignore %) $(ONCE_MORE)
	# Hosts that are network namespaces, and the memory of a process, want the machine for themselves.
	$(PYTEST) -m check $(ALONE) $(ONCE_MORE)

lint: $(VENV)/.tools ## ruff, mypy, the floors, names and docstrings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/prose.py

docs: $(VENV)/.tools ## the documentation, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# That they run is what counts here, not what they measure: two (JOBS) at once, each on one thread. Those that make hosts, or
# strike at moments, have the machine for themselves.
BENCHES_ALONE := network soak

benches: $(VENV)/.tools $(VENV)/.native ## every bench, shortly
	@mkdir -p build
	printf '%s\n' $(filter-out $(BENCHES_ALONE),$(BENCHES)) | OMP_NUM_THREADS=1 xargs -P $(or $(JOBS),2) -I{} bash -c \
	  '$(BIN)/python -m bench.{} --quick >build/bench-{}.log 2>&1; status=$$?; cat build/bench-{}.log; exit $$status'
	for bench in $(BENCHES_ALONE); do $(BIN)/python -m bench.$$bench --quick; done

decks: $(VENV)/.native ## the decks' figures beside ours, in docs/decks.md, from stored results
	$(BIN)/python -m bench.decks

# No prerequisites: on a machine without a network there is no .venv, and the kit has what python3 lacks.
gpu: ## everything that needs a GPU, in pieces (DRY=1 tries it on the processor; OUT=DIR MINUTES=8 AGAIN=1)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench.gpu $(if $(DRY),--dry) $(if $(OUT),--out $(OUT)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(AGAIN),--again)

gpu-kit: ## what a GPU machine without a network lacks, in gpu-kit/ (at most 48 MB)
	$(MAKE) --no-print-directory wheel DIST=build/gpu-kit-wheel
	$(BIN)/python -m bench._gpu.gather build/gpu-kit-wheel/*.whl gpu-kit

# The tests that need the peers skip with the reason where these could not be installed; in CI that is a failure.
peers: ## other people's readers and loaders, in .venv-peers
	@[[ $(PEERS)/.stamp -nt constraints-peers.txt ]] || $(MAKE) --no-print-directory $(PEERS)/.stamp \
	  || { [[ $${CI:-} != true ]] && echo "The peers could not be installed: their tests are skipped."; }

# FFCV is source. Its one header is all of OpenCV, of which it calls core and imgproc; so only these are asked for. It
# also names opencv-python, which needs a display's libraries.
FFCV_FLAGS := PKG_CONFIG_PATH="$(CURDIR)/bench/_peers" CPPFLAGS=-I/usr/include/opencv4 \
  CXXFLAGS="-O3 -include opencv2/imgproc.hpp -DOPENCV_ALL_HPP"
INSTALL_PEERS := $(PEERS)/bin/python $(PIP) -c constraints-peers.txt

$(PEERS)/.stamp: constraints-peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	echo '*' > $(PEERS)/.gitignore
	$(INSTALL_PEERS) nvidia-dali-cuda120 lmdb numpy opencv-python-headless pillow setuptools torch webdataset wheel
	$(INSTALL_PEERS) accelerate lightning optuna transformers
	$(INSTALL_PEERS) fastapi httptools litserve onnxruntime uvicorn uvloop
	$(INSTALL_PEERS) assertpy fastargs numba psutil pytorch-pfn-extras terminaltables tqdm
	$(FFCV_FLAGS) $(INSTALL_PEERS) --no-deps --no-build-isolation ffcv >/dev/null 2>&1 \
	  || echo "FFCV could not be built (it needs g++ libopencv-imgproc-dev libturbojpeg0-dev pkg-config python3-dev): benches go without it."
	touch $@

wheel: $(VENV)/.base ## a wheel for this platform and every Python, libjpeg-turbo in it, in dist/
	$(INSTALL) --group wheel
	rm -rf build/wheel
	$(BIN)/python $(subst install,wheel,$(PIP)) --no-deps --build-constraint constraints.txt --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) build/wheel/*.whl

refresh: $(VENV)/.base ## newest versions into constraints.txt, newest base image into deploy/ (TORCH=2.14.0 for another torch)
	$(BIN)/python deploy/refresh.py $(if $(TORCH),--torch $(TORCH))

clean: ## remove what was made, the virtual environments excepted
	rm -rf demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +
