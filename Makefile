# Precompose. `make help` lists the targets.
# TORCH=2.11 selects the second lock, with an environment of its own; PYTHON=… names the Python 3.11 to use.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Without bytecode files, every process that imports composer compiles it again, which takes 8 s.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help install test test-cluster test-image test-stores lint quickstart quickstart-tokens openmoji-vae \
    openmoji-dvae openmoji-text gpu docs lock clean distclean

TORCH ?= 2.7
ifeq ($(TORCH),2.7)
  VENV := .venv
  LOCK := requirements.lock
else ifeq ($(TORCH),2.11)
  VENV := .venv-torch211
  LOCK := requirements-torch211.lock
else
  $(error TORCH=$(TORCH): no such lock; allowed: 2.7, 2.11)
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- install -----------------------------------------------------------------------------------

# The stamp holds the folder of the environment and the lock, and is written last. An interrupted install,
# a changed lock and a moved checkout (scripts contain the path of their interpreter) are therefore noticed,
# and the environment is created again from nothing: a package that left the lock cannot stay importable.
install:  ## create the environment from the lock; does nothing if it is complete
	@want=$$(pwd -P; cat $(LOCK)); \
	if [ "$$want" = "$$(cat $(STAMP) 2>/dev/null || true)" ] && $(BIN)/python -c '' 2>/dev/null; then \
	    echo "install: $(VENV) is complete"; exit 0; \
	fi; \
	if [ $(TORCH) = 2.7 ] && [ "$$(uname -m)" != x86_64 ]; then \
	    echo "install: $(LOCK) has packages without wheels for this machine ($$(uname -m))." \
	        "Give TORCH=2.11 to every make command" >&2; \
	    exit 1; \
	fi; \
	$(find_python); \
	echo "install: $(VENV), $$("$$python" -V), $$(wc -l < $(LOCK)) packages of $(LOCK), about 7 GB"; \
	rm -rf $(VENV); \
	"$$python" -m venv $(VENV); \
	uv=$$(grep '^uv==' $(LOCK)); \
	quiet=$$([ -t 2 ] || echo --quiet); \
	if $(PIP) "$$uv" && $(BIN)/uv pip install --python $(BIN)/python --no-deps $$quiet -r $(LOCK); then :; else \
	    echo "install: uv did not work here, trying pip (minutes)"; \
	    $(PIP) --no-compile -r $(LOCK); \
	fi; \
	printf '%s\n' "$$want" > $(STAMP).part; \
	mv $(STAMP).part $(STAMP); \
	echo "install: done, $(BIN)/python"

# Sets $$python to the first candidate that is a Python 3.11 and can create an environment.
define find_python
python=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3 python); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' \
	        2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "install: needs Python 3.11 with its venv module (Debian: python3.11-venv); tried" \
	        "$(or $(PYTHON),python3.11 python3 python). Name one: make install PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi
endef

GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

# --- checks ------------------------------------------------------------------------------------

PYTEST_ARGS ?=
# Processes that run tests: one more than there are cores, since some tests wait for processes of their own. Each imports
# what it needs, so more than four gain little. JOBS=0 runs them in one.
JOBS ?= $(shell echo $$(( $$(nproc) + 1 )))

# On a machine with a GPU, all tests run as on one without, and then those of the GPU. PYTEST_ARGS may select none (5).
PYTEST := $(BIN)/python -m pytest -q -ra --durations=10 -n $(JOBS) --maxprocesses 4 --no-loadscope-reorder

test: lint  ## run the linters and the tests; PYTEST_ARGS='-k name' selects some
	$(if $(GPU),CUDA_VISIBLE_DEVICES= )$(PYTEST) $(PYTEST_ARGS)
	$(if $(GPU),$(PYTEST) -m gpu $(PYTEST_ARGS) || [ $$? = 5 ])

test-cluster: install  ## submit jobs to a Slurm that is started here, which needs root; check manifests of Kubernetes
	$(BIN)/python -m pytest -q -ra -p no:xdist tests/cluster/trial_kubernetes.py tests/cluster/trial_slurm.py

# The servers are installed by uv and npm, apart from the environment, when they are started first.
test-stores: install  ## encode, train and resume with servers of Google Cloud Storage and Azure here; needs Node.js
	$(BIN)/python -m pytest -q -ra -p no:xdist tests/recipes/trial_stores.py

test-image: install  ## build the image (docker; as root: buildah) and train in it; IMAGE=name tries one that exists
	$(BIN)/python -m pytest -q -ra -rP -p no:xdist tests/cluster/trial_image.py

lint: install  ## run ruff and hadolint
	$(BIN)/ruff check .
	$(BIN)/hadolint Dockerfile

# --- quickstart --------------------------------------------------------------------------------

# Without a GPU one process trains, without a launcher, which would import all of Composer a second time; with GPUs the
# launcher starts one process per GPU.
ONE := $(BIN)/$(if $(GPU),composer,python)
# The diffusion model and the transformer are trained by two processes of one thread, which a second program on one of two
# cores slows less than one process of two threads. Images are read by one process; those stages run side by side instead.
TWO := $(BIN)/$(if $(GPU),composer,torchrun --standalone --nproc_per_node $(shell [ "$$(nproc)" -ge 2 ] && echo 2 || echo 1))
SAMPLES := runs/openmoji_diffusion/samples.png
TOKEN_SAMPLES := runs/openmoji_dalle/samples.png
# ENGINE=lightning trains with Lightning; without it the recipes' own engine does.
ENGINE ?=

# $(call train,STAGE,TITLE,RECIPE,LAUNCHER) trains, unless the export of the recipe is complete (done.json is written last).
define train
@echo "== $(1) $(2)"; \
	if [ -f runs/$(3)/export/done.json ]; then \
	    echo "already complete: runs/$(3)/export; delete it to run again"; \
	else \
	    $(or $(4),$(ONE)) recipes/train.py yamls/$(3).yaml $(if $(ENGINE),training.engine=$(ENGINE)); \
	fi
endef

quickstart: install  ## OpenMoji from nothing to samples: VAE, text encoder, latents, diffusion model; ENGINE=lightning
	@echo "== 1/6 render the small OpenMoji set"; $(BIN)/python data/openmoji.py --set small --out runs/openmoji/tars
	@$(MAKE) --no-print-directory $(if $(GPU),,-j 2) openmoji-vae openmoji-text
	@echo "== 4/6 encode images and captions"; $(BIN)/python precompute/encode.py yamls/openmoji_encode.yaml
	$(call train,5/6,train the diffusion model,openmoji_diffusion,$(TWO))
	@echo "== 6/6 draw samples"; \
	$(BIN)/python recipes/generate.py runs/openmoji_diffusion/export --out $(SAMPLES) \
	    --prompts-file docs/openmoji_prompts.txt --columns 6
	@$(BIN)/python recipes/compare.py runs/openmoji_diffusion --out runs/openmoji_diffusion/report.html

# The networks that encode are the second and third stage of either quickstart, which has STAGES of them.
STAGES ?= 6
openmoji-vae openmoji-dvae openmoji-text: export OMP_NUM_THREADS ?= 1
openmoji-vae:
	$(call train,2/$(STAGES),train the VAE,openmoji_vae)
openmoji-dvae:
	$(call train,2/$(STAGES),train the dVAE,openmoji_dvae)
openmoji-text:
	$(call train,3/$(STAGES),train the text encoder,openmoji_text)

quickstart-tokens: install  ## the same with tokens: data, dVAE, text encoder, BPE, tokens, transformer
	@echo "== 1/7 render the small OpenMoji set"; $(BIN)/python data/openmoji.py --set small --out runs/openmoji/tars
	@$(MAKE) --no-print-directory $(if $(GPU),,-j 2) STAGES=7 openmoji-dvae openmoji-text
	@echo "== 4/7 train the BPE vocabulary"; $(BIN)/python precompute/vocabulary.py yamls/openmoji_vocabulary.yaml
	@echo "== 5/7 encode images to tokens"; $(BIN)/python precompute/encode.py yamls/openmoji_tokens.yaml
	$(call train,6/7,train the transformer,openmoji_dalle,$(TWO))
	@echo "== 7/7 draw samples: the best of 32 candidates per caption"; \
	$(BIN)/python recipes/generate.py runs/openmoji_dalle/export --out $(TOKEN_SAMPLES) --candidates 32 \
	    --temperature 0.5 --rerank runs/openmoji_text/export --prompts-file docs/openmoji_prompts.txt --columns 6
	@$(BIN)/python recipes/compare.py runs/openmoji_dalle --out runs/openmoji_dalle/report.html

# --- measurements ------------------------------------------------------------------------------

# Without the environment, the Python at hand: a GPU machine without a network has packages of its own (docs/gpu.md).
GPU_ARGS ?=

gpu:  ## tests, numbers and speed on one GPU in nine minutes; GPU_ARGS='--only unet_256' selects some
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) benchmarks/gpu.py $(GPU_ARGS)

# --- upkeep ------------------------------------------------------------------------------------

docs: install  ## generate docs/recipes.md from the code
	$(BIN)/python docs/make_recipes.py --out docs/recipes.md

# Locked versions are kept if they still satisfy requirements.in; UPGRADE=1 takes the newest.
COMPILE = $(BIN)/uv pip compile --quiet requirements.in --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --no-header --no-annotate $(if $(UPGRADE),--upgrade)

lock: install  ## resolve requirements.in to both locks; UPGRADE=1 takes the newest versions
	$(COMPILE) -o requirements.lock
	$(COMPILE) --overrides requirements-torch211.in -o requirements-torch211.lock

clean:  ## remove caches; keep the environments and runs/
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove caches and both environments; keep runs/
	rm -rf .venv .venv-torch211
