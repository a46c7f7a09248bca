# Everything needs only Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= acts/demo

.PHONY: demo test lint chaos bench docs wheel clean

demo: $(VENV)/.spile
	$(BIN)/spile extract --model demo --corpus demo --taps resid_post:9,mlp_out:9 \
	  --max-docs 25 --seq-len 512 --unit-tokens 3k --out $(OUT)

test: lint $(VENV)/.saelens
	SPILE_SAELENS_PYTHON="$$(test -f $(VENV)/.saelens && echo $(CURDIR)/$(VENV)/saelens/bin/python)" \
	  $(BIN)/pytest -n 3 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

chaos: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal tests/chaos --chaos-full
	$(BIN)/pytest -n 2 --dist worksteal -m full tests --ignore tests/chaos --chaos-full
	$(BIN)/pytest tests/run/test_mesh.py --chaos-full

bench: $(VENV)/.dev
	$(BIN)/python bench/cpu.py

docs: $(VENV)/.dev
	$(BIN)/python scripts/make_reference.py docs/reference
	$(BIN)/zensical build --strict --clean

wheel: $(VENV)/.dev
	$(BIN)/pip wheel -q --no-deps -w dist .

$(VENV)/.spile: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.spile
	$(BIN)/pip install -q -e '.[demo,dev]'
	touch $@

# SAELens wants versions of its own. Where it does not install, its test is skipped, and says so.
$(VENV)/.saelens: Makefile | $(VENV)/.spile
	$(PYTHON) -m venv $(VENV)/saelens
	-$(VENV)/saelens/bin/pip install -q torch==2.13.0 sae-lens==6.54.12 && touch $@

clean:
	rm -rf $(VENV) dist site docs/reference .cache acts .pytest_cache .ruff_cache
