# `make demo` and `make test` are all a new user needs; each installs what it needs into .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
AXOLOTL ?= axolotl==0.19.0
SWIFT ?= ms-swift==4.6.0
DEEPSPEED ?= deepspeed==0.19.8
BIN := .venv/bin
CHECKED := src tests utils benchmarks examples setup.py $(wildcard docs/*.py docs/*/*.py)
TESTS ?= tests
# Whole files stay in one worker, so that what their tests share is computed once, until the other has nothing left.
PYTEST := -m pytest -n auto --dist worksteal -m "not slow and not gpu"
# Tensors, data, one family of models and the checks of a Trainer: no process but the workers, no interpreted kernel.
FAST := tests/test_boundaries.py tests/data tests/ops tests/models/qwen3_5 tests/training/test_checks.py
NOT_FAST := $(addprefix tests/ops/test_,fused.py moe.py prompts.py float8.py flash_qla_kernels.py) tests/ops/test_cross_entropy.py tests/ops/test_autograd.py tests/ops/test_causal_conv1d_qkv.py tests/data/planning/test_memory.py tests/data/planning/test_measured_memory.py tests/data/test_collator_checks.py
# torchao's compiled extensions need CUDA. On a CPU, each process would log that they cannot be loaded.
export TORCHAO_FORCE_SKIP_LOADING_SO_FILES := 1
# Images of containers often forbid Python to keep what it compiles. Each of the tests' processes would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
# The code of the pages, of examples/ and of the notebook, which `make docs` runs.
PAGES := tests/docs tests/test_example_scripts.py tests/test_notebook.py
# Model families with dedicated classes, how they take the stock classes' place, and the trainers.
CORE := tests/test_boundaries.py tests/models/qwen3_5 tests/models/qwen3_next tests/models/qwen3_5_moe \
	$(addprefix tests/models/test_,registry.py patch.py patch_hooks.py checkpoints.py shared_prompts.py verdict.py) \
	$(addprefix tests/data/test_,collator.py collator_checks.py) \
	$(addprefix tests/training/test_,checks.py configure.py trainer.py stock_trainer.py lora.py)
RELEASES ?= 5.16.1 5.17.0 5.18.0 5.19.0 5.20.2 5.21.1 5.22.2 5.23.0
SEED ?= 0
SECONDS ?= 120

.PHONY: demo test test-fast test-lowest test-newest test-matrix test-gpu fuzz bench support-matrix upstream-patches test-upstream test-integrations docs dist style quality modular check-modular help

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

# Where pip would only say that there is no matching distribution for transformers.
CHECK_PYTHON := -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python %d.%d is too old: make PYTHON=python3.11 (or newer; rm -rf .venv first)" % v[:2])'

# .venv has two stages: what the demo needs, and the rest. Torch goes in first and by name, so that TORCH decides which
# build the machine gets. pip would compile every module of torch and Transformers; Python compiles the few that it runs.
.venv/.demo: setup.py
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) $(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q --no-compile "$(TORCH)"
	$(BIN)/pip install -q --no-compile -e ".[demo]"
	touch $@

.venv/.installed: .venv/.demo
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

# uv takes the lowest release that each bound of setup.py allows. The whole suite runs from Transformers 5.20 on.
.venv-lowest/.installed: setup.py
	@$(PYTHON) $(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/pip install -q uv
	.venv-lowest/bin/uv pip install -q --python .venv-lowest --resolution lowest-direct -e ".[dev]" "transformers>=5.20.0"
	touch $@

# The build of torch for CPUs leaves the version of triton open. With newer ones, Axolotl's flash-linear-attention cannot
# be imported. This package goes in last and without its dependencies, which Axolotl has in other versions.
.venv-axolotl/.installed: setup.py
	@$(PYTHON) $(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-axolotl
	.venv-axolotl/bin/pip install -q "$(TORCH)" "$(AXOLOTL)" "triton==3.7.1" pytest parameterized
	.venv-axolotl/bin/pip install -q --no-deps -e .
	touch $@

# Axolotl 0.21 needs Python 3.12, which uv brings where there is none.
.venv-axolotl-newest/.installed: setup.py .venv/.installed
	$(BIN)/pip install -q uv
	$(BIN)/uv venv -q --clear --seed --python 3.12 $(@D)
	$(@D)/bin/pip install -q "$(TORCH)" "axolotl==0.21.0" "triton==3.7.1" pytest parameterized
	$(@D)/bin/pip install -q --no-deps -e .
	touch $@

# The package index has no torchvision for CPUs, and that for CUDA cannot be imported beside a torch for CPUs.
.venv-swift/.installed: setup.py
	@$(PYTHON) $(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-swift
	.venv-swift/bin/pip install -q "$(TORCH)" torchvision "$(SWIFT)" "qwen_vl_utils>=0.0.14" "triton==3.7.1" pytest parameterized
	.venv-swift/bin/pip install -q --no-deps -e .
	.venv-swift/bin/python -c "import torchvision" 2>/dev/null || { \
		site=$$(.venv-swift/bin/python -c "import site; print(site.getsitepackages()[0])") && \
		cp tests/common/torchvision_names.py $$site && echo "import torchvision_names" > $$site/torchvision_names.pth; }
	touch $@

# Only what .venv lacks, and beside it, because Trainer imports DeepSpeed wherever it is installed. No op of it is compiled.
.venv-deepspeed/.installed: .venv/.installed
	rm -rf .venv-deepspeed
	DS_BUILD_OPS=0 $(BIN)/pip install -q --target .venv-deepspeed --no-deps "$(DEEPSPEED)" hjson msgpack py-cpuinfo
	touch $@

# Of the libraries whose private parts `models/releases.py` lists, also pre-releases. --pre would take those of torch too,
# but pip upgrades no dependency that is new enough.
.venv-newest/.installed: setup.py
	@$(PYTHON) $(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install -q -U -e ".[dev]"
	.venv-newest/bin/pip install -q -U --pre transformers trl peft accelerate
	touch $@

demo: .venv/.demo  ## Train a small model padded and packed on the CPU, print a comparison, write demo.png.
	$(BIN)/transformers-packed demo

test: .venv/.installed  ## Run the test suite (CPU), but for the code of the documentation.
	$(BIN)/python $(PYTEST) $(TESTS) $(if $(filter tests,$(TESTS)),$(PAGES:%=--ignore=%))

test-fast: .venv/.installed  ## Run what one runs between edits: boundaries, data, ops and the Qwen3.5 family (CPU).
	$(BIN)/python $(PYTEST) $(FAST) $(NOT_FAST:%=--ignore=%)

test-lowest: .venv-lowest/.installed  ## Run the test suite (CPU) on the oldest supported release of every dependency.
	.venv-lowest/bin/python $(PYTEST) $(TESTS)

test-newest: .venv-newest/.installed  ## Run the test suite (CPU) on the newest releases, and on pre-releases of Transformers, TRL, PEFT, accelerate.
	.venv-newest/bin/python $(PYTEST) $(TESTS)

test-matrix: .venv/.installed  ## Run the core tests (CPU) on RELEASES of Transformers (the last of 5.16 to 5.23).
	@failed=; for release in $(RELEASES); do \
		test -d .venv-matrix/$$release/transformers-$$release.dist-info || $(BIN)/pip install -q --target .venv-matrix/$$release transformers==$$release || exit; \
		echo "Transformers $$release"; \
		PYTHONPATH=$(CURDIR)/.venv-matrix/$$release $(BIN)/python $(PYTEST) -q $(CORE) || failed="$$failed $$release"; \
	done; test -z "$$failed" || { echo "failed on$$failed"; exit 1; }

test-gpu: .venv/.installed  ## Run the tests that need a CUDA device; puts the figures into benchmarks/results/gpu_tests.json.
	TRANSFORMERS_PACKED_GPU_SUMMARY=benchmarks/results/gpu_tests.json $(BIN)/python -m pytest -m gpu $(TESTS)

fuzz: .venv/.installed  ## Train random set-ups packed, from SEED (0) for SECONDS (120), and compare with padded built-in classes.
	$(BIN)/python utils/fuzz.py --seed $(SEED) --seconds $(SECONDS)

bench: .venv/.installed  ## Measure packed against padded training and the planning of rows, on the CPU; writes benchmarks/results.
	$(BIN)/python benchmarks/cpu_step.py
	$(BIN)/python benchmarks/step.py --models tiny --tokens 2048 --arms padded ours --repeats 3
	$(BIN)/python benchmarks/packing.py

support-matrix: .venv/.installed  ## Audit every causal type of the installed Transformers (CPU, ten minutes on 2 cores).
	$(BIN)/python utils/audit_all.py --output docs/reference/support_matrix.md --json src/transformers_packed/models/support_matrix.json

# TRANSFORMERS=path takes a checkout or an unpacked sdist instead of the installed package.
upstream-patches: .venv/.installed  ## Write patches for Transformers into build/upstream.
	$(BIN)/python utils/upstream_patch.py $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS))

test-upstream: .venv/.installed  ## Run the tests of these patches without and with them, and all together (CPU, minutes).
	$(BIN)/python utils/upstream_patch.py --prove --together $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS))

test-integrations: .venv-axolotl/.installed .venv-axolotl-newest/.installed .venv-swift/.installed .venv-deepspeed/.installed  ## Train with other frameworks and with DeepSpeed, in their environments (CPU, minutes).
	.venv-axolotl/bin/python -m pytest tests/integrations/test_axolotl.py
	.venv-axolotl-newest/bin/python -m pytest tests/integrations/test_axolotl.py
	.venv-swift/bin/python -m pytest tests/integrations/test_ms_swift.py
	PYTHONPATH=$(CURDIR)/.venv-deepspeed DS_ACCELERATOR=cpu $(BIN)/python -m pytest tests/training/test_deepspeed.py

# Zensical itself fails on a broken link, not on a warning about a docstring.
docs: .venv/.installed  ## Build the documentation into site/, and run its code; fails on broken links and on warnings.
	@output=$$($(BIN)/zensical build --strict --clean 2>&1); status=$$?; printf '%s\n' "$$output"; \
	! printf '%s\n' "$$output" | grep -qE '^(griffe|mkdocstrings|mkdocs_autorefs):' && exit $$status
	$(BIN)/python $(PYTEST) $(PAGES)

# `build` makes the wheel from the sdist, so that no file outside the sdist gets into either. A list of sources from an
# earlier build would add files to the sdist.
dist: .venv/.installed  ## Build the sdist and the wheel into dist/, and check their metadata.
	$(BIN)/pip install -q "build>=1.2" "twine>=6.1"
	rm -rf dist src/transformers_packed.egg-info/SOURCES.txt
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

style: .venv/.installed  ## Format the code and sort the imports.
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

quality: .venv/.installed  ## Check formatting, lint, types, that imports go one way down, and the sizes of functions.
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python utils/count.py src

modular: .venv/.installed  ## Generate the modeling files from the modular files.
	$(BIN)/python utils/modular_model_converter.py

check-modular: .venv/.installed  ## Fail when a generated modeling file is stale.
	$(BIN)/python utils/modular_model_converter.py --check
