# The front door. Each target sets up all that it needs; `make` lists them.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# One thread each, since chapters and notebooks run side by side, and threads that wait do not
# spin, should there be more of them than cores; no progress bars in outputs.
export OMP_NUM_THREADS      ?= 1
export MKL_NUM_THREADS      ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export OMP_WAIT_POLICY      ?= passive
export TQDM_DISABLE         ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# A list of fonts of this folder's own: one in the home may lack those that Matplotlib brings.
export MPLCONFIGDIR         ?= $(CURDIR)/_build/matplotlib
# Without LC_ALL, Python takes a C locale for UTF-8: the path of this folder may have any letters.
ifneq (,$(filter C POSIX,$(LC_ALL)))
unexport LC_ALL
endif
# A hundred processes import the library: the first one stores it compiled.
unexport PYTHONDONTWRITEBYTECODE

READY  := $(VENV)/.ready
LOCKED := $(VENV)/.locked
EXTRAS := book test certify cluster hub browser
GROUPS := audit container mutants uv
HASHED := --only-binary :all: --require-hashes --requirement locks/requirements.txt
PIP     = $(BIN)/python -m pip install --quiet
NO_GPU  = [ "$$(uname)" = Linux ] && [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi > /dev/null
CPU    := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
SHOW    = @printf '\n\033[1m%s\033[0m\n'

.DEFAULT_GOAL := help
.PHONY: help env book run gpu gpu-queue hub html address pdf test unit quick nbval steady seeds small browser chromium mutants lint format wheel lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# The versions of the lock. Then torch, whose default on Linux brings gigabytes of CUDA libraries:
# without a GPU, PyTorch's own index offers a build for the CPU. If it does not answer, pip goes on.
$(LOCKED): locks/requirements.txt locks/constraints.txt
	$(SHOW) 'Environment: $(VENV) (a minute or two, once)'
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or \
	  sys.exit(f"Python 3.11 to 3.14 is needed, not {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	if command -v uv > /dev/null; then uv pip install --quiet --python $(BIN)/python $(HASHED); \
	  else $(PIP) --no-compile $(HASHED); fi
	cpu=; if $(NO_GPU); then cpu='$(CPU)'; fi; \
	  $(PIP) --no-compile --constraint locks/constraints.txt $$cpu torch
	-@$(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing|transformers/models)/' $(VENV)/lib
	@touch $@

$(READY): $(LOCKED) pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import matplotlib.font_manager'
	@touch $@

env: $(READY) ## create the environment in .venv

book: run html ## run every chapter that changed, then build the HTML
	@printf '\nThe book: file://%s/_build/html/index.html\n' "$$PWD"

run: $(READY) ## text -> executed notebooks -> claims page (FORCE=1: all; CHAPTER=part/name: one)
	$(SHOW) 'Chapters'
	@$(BIN)/python -m tools.run $(if $(FORCE),--force) $(CHAPTER)
	@$(BIN)/python -m tools.claims

gpu: $(READY) ## train a chapter's figures again (CHAPTER=training/growth MINUTES=10, DEVICE=cuda, PROFILE=paper)
	@$(BIN)/python -m tools.run $(or $(CHAPTER),$(error CHAPTER=part/name is missing)) \
	  -p device $(or $(DEVICE),cuda) -p minutes $(or $(MINUTES),10) -p profile $(or $(PROFILE),paper)

gpu-queue: $(READY) ## HOURS=3 of a GPU for what is missing of Mahdavi et al., then the book renewed, in one commit (PLAN=1: only say what; DEVICE=cpu WORKERS=2)
	@$(BIN)/python -m tools.evening --hours $(or $(HOURS),$(error HOURS=3 is missing)) \
	  --device $(or $(DEVICE),cuda) $(if $(WORKERS),--workers $(WORKERS)) $(if $(PLAN),--plan)

hub: $(READY) ## test the published images, texts and models, fetched from a hub, then the book renewed, in one commit (STUDIES=assumptions-bert; DEVICE=cuda)
	@$(BIN)/python -m tools.evening --hub $(STUDIES) --device $(or $(DEVICE),auto) $(if $(WORKERS),--workers $(WORKERS))

html: $(READY) ## build the HTML from the notebooks as they are, warnings are errors
	$(SHOW) 'HTML'
	$(BIN)/jupyter-book build . --all -n -W --keep-going
	@test -s _build/html/book/notebooks/front/overview.html

address: $(READY) ## set the repository's address, and so the book's, in _config.yml (URL=https://github.com/..., SITE= elsewhere; URL= takes it back)
	@$(if $(filter command,$(origin URL)),,$(error URL=https://github.com/... is missing; URL= takes the address back))
	@$(BIN)/python -m tools.address '$(URL)' '$(SITE)'

pdf: chromium ## the built book as one PDF, _build/book.pdf (after make book; some minutes)
	$(SHOW) 'PDF'
	$(BIN)/python -m tools.pdf

test: unit $(if $(FILE),,nbval) ## all tests: library, theory, structure of the book, then every notebook's outputs (FILE=lib/attnmem/core/bounds.py: those of one module)

# The tests of lib/attnmem/core/bounds.py are tests/unit/core/test_bounds.py and test_bounds_*.py.
MIRRORED = $(shell echo $(FILE) | sed -E '/^lib/{s|^lib/attnmem_yours/|tests/unit/yours/|; s|^lib/attnmem/|tests/unit/|; s|/_*([a-z_]*[a-z])_*\.py$$|/test_\1.py|}')
TESTED = $(or $(sort $(wildcard $(MIRRORED) $(MIRRORED:.py=_*.py))),$(error FILE=$(FILE): no tests $(MIRRORED) are there))

unit: $(READY) ## library, theory and book-structure tests (SHAPES=1: with every stated shape checked; FILE=)
	$(SHOW) 'Library, theory, structure of the book'
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  $(if $(SHAPES),--shapes) $(if $(FILE),$(TESTED))

quick: $(READY) ## a minute of tests: the core
	$(SHOW) 'The core'
	$(BIN)/python -m pytest -q tests/unit/core tests/unit/test_checks.py

nbval: $(READY) ## re-run every notebook and compare its outputs with the stored ones
	$(SHOW) 'Stored outputs of every chapter'
	$(BIN)/python -m pytest -q --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg \
	  --nbval-cell-timeout 300 --nbval-kernel-startup-timeout 300 -n 2 --dist loadscope book/notebooks

steady: $(READY) ## every chapter under other arithmetics: what differs from the stored (CHAPTER=; ON=haswell,busy)
	$(SHOW) 'Outputs under other arithmetics'
	$(BIN)/python -m tools.steady $(if $(ON),--on $(ON)) $(CHAPTER)

seeds: $(READY) ## every chapter with a seed at other seeds: each verdict keeps its word (SEEDS="1 2 3"; CHAPTER=; SINCE=main: changed)
	$(SHOW) 'Verdicts at other seeds'
	$(BIN)/python -m tools.vary $(if $(SINCE),--since $(SINCE)) --seeds $(or $(SEEDS),1 2 3) -- $(CHAPTER)

small: $(READY) ## every chapter at its least values and with quick, and what it has to refuse (CHAPTER=; SINCE=main: changed)
	$(SHOW) 'Chapters at their least values'
	$(BIN)/python -m tools.vary $(if $(SINCE),--since $(SINCE)) --small $(CHAPTER)

browser: chromium ## the built book in Chromium: every page, wide and on a phone (after make book)
	$(SHOW) 'The book in a browser'
	$(BIN)/python -m pytest -q -n 2 tests/browser

chromium: $(READY) # Debian's if it is there or root can install it, else the one that playwright brings
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && \
	  apt-get -qq update && apt-get -qq install chromium > /dev/null; } || \
	  $(BIN)/playwright install --with-deps chromium

mutants: $(READY) _build/ray/.ready ## small mistakes in a module, as committed, that the tests that import it do not see (MODULE=attnmem/pages/scaling.py; SAMPLE=100: of so many; LIVE=30: fails if more per cent do; TESTS=: others)
	@$(BIN)/python -m tools.mutants $(or $(MODULE),$(error MODULE=attnmem/pages/scaling.py is missing)) \
	  $(if $(TESTS),--tests $(TESTS)) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(LIVE),--live $(LIVE))

# Without yattag, which makes its reports in HTML and has no wheel: building it would run its code.
_build/ray/.ready: locks/mutants.txt
	$(PYTHON) -m venv _build/ray
	_build/ray/bin/python -m pip install --quiet --no-deps --only-binary :all: --require-hashes --requirement $<
	@touch $@

lint: $(READY) ## style and formatting of code and notebooks, and the types of the core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check lib tests tools
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY) ## format code and the cells of the text sources
	$(BIN)/ruff check --fix lib tests tools
	$(BIN)/ruff format lib tests tools
	$(BIN)/jupytext --quiet --to md:myst --pipe '$(BIN)/ruff format --config book/ruff.toml -' \
	  book/text/*/*.md

wheel: $(READY) ## build the library's wheel into dist/
	$(BIN)/python -m tools.wheel

LOCK = _build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
  --custom-compile-command 'make lock' --no-emit-index-url
WITH_HASHES = --constraint locks/constraints.txt --generate-hashes $(addprefix --no-emit-package ,torch yattag)

lock: ## renew locks/ and environment.yml from pyproject.toml (UPGRADE=1: newest versions)
	$(PYTHON) -m venv _build/uv && _build/uv/bin/python -m pip install --quiet --only-binary :all: --require-hashes --requirement locks/uv.txt
	$(LOCK) $(addprefix --extra ,$(EXTRAS)) $(if $(UPGRADE),--upgrade) --output-file locks/constraints.txt pyproject.toml
	$(LOCK) $(addprefix --extra ,$(EXTRAS)) $(WITH_HASHES) --output-file locks/requirements.txt pyproject.toml
	for group in $(GROUPS); do \
	  $(LOCK) --group $$group $(WITH_HASHES) $(if $(UPGRADE),--upgrade) --output-file locks/$$group.txt || exit 1; done
	awk -F== 'NR == FNR {pin[$$1] = $$2; next} {name = $$1; sub(/^ +- /, "", name)} \
	  NF == 2 && name in pin {$$0 = $$1 FS pin[name]} 1' locks/constraints.txt environment.yml > _build/environment.yml
	cp _build/environment.yml environment.yml

clean: ## remove everything that can be made again
	rm -rf _build dist build $(VENV) .pytest_cache .ruff_cache .hypothesis
