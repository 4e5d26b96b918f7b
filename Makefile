# make demo       set up .venv for this machine and ask about a shipped picture
# make test       set up and run the tests
# make evaluate   measure the demo checkpoint on freshly drawn pictures (adds scikit-learn to .venv)
# make notebooks  run the example notebooks and store what they show
# make goldens    make the reference results anew with transformers (adds torch to .venv: gigabytes on Linux)
# make fidelity   compare with transformers live (adds torch as well)
# make clean      remove .venv and everything built
#
# PYTHON=python3.12 make demo   takes that Python; else the first one that is 3.10 or newer
# BACKEND=cpu make demo         mac, cpu, cuda12 or cuda13; else what the machine has

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; done)
endif

# Plain mlx has Metal on macOS. On Linux the newest CUDA that the driver knows decides; no driver means the CPU.
ifndef BACKEND
BACKEND := $(shell if [ "$$(uname -s)" = Darwin ]; then echo mac; exit; fi; \
	cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
	if [ "$${cuda:-0}" -ge 13 ]; then echo cuda13; elif [ "$${cuda:-0}" -ge 12 ]; then echo cuda12; else echo cpu; fi)
endif

VENV := .venv
READY := $(VENV)/.ready-$(BACKEND)
PICTURE := examples/demo/pictures/three_shapes.png

.PHONY: help demo test evaluate notebooks goldens fidelity clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(READY)
	@$(VENV)/bin/python examples/describe_image.py $(PICTURE) "What is in this image?"
	@echo; echo '$$ dgemma generate --watch --image $(PICTURE) "Caption this picture."'
	@$(VENV)/bin/dgemma generate $$([ -t 2 ] && echo --watch) --image $(PICTURE) "Caption this picture."

test: $(READY)-test
	@$(VENV)/bin/python -m pytest

evaluate: $(READY)-evaluate
	@$(VENV)/bin/python examples/demo/evaluate.py --runtime dgemma

notebooks: $(READY)-test
	@$(VENV)/bin/python examples/notebooks/run_notebooks.py

goldens: $(READY)-dev
	@$(VENV)/bin/python tests/oracle/make_goldens.py
	@$(VENV)/bin/python tests/oracle/make_reads.py

fidelity: $(READY)-dev
	@$(VENV)/bin/python tests/oracle/live.py
	@$(VENV)/bin/python tests/oracle/make_reads.py --live

clean:
	rm -rf $(VENV) build dist dgemma.egg-info .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment: a file in .venv says that a part of it is complete ------------------------------------------------

# $(1): extras beside the backend's own. Bytecode is left to the first import: most of these files are never imported.
comma := ,
extras = $(subst $() ,$(comma),$(strip $(filter-out mac,$(BACKEND)) $(1)))
install = echo "dgemma: installing for $(BACKEND)$(if $(1), with what '$(1)' needs) (a minute or three, once)" && \
	$(VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -e '.$(if $(extras),[$(extras)])'

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "dgemma: no Python 3.10 or newer found; install one, or name it: PYTHON=/path/to/python make" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "dgemma: $(PYTHON) is missing or older than 3.10; name a newer one: PYTHON=/path/to/python make" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "dgemma: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(READY): $(VENV)/.made pyproject.toml
	@$(call install,)
	@touch $@

$(READY)-%: $(VENV)/.made pyproject.toml
	@$(call install,$*)
	@touch $(READY) $@
