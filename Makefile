# Everything needs only Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= acts/demo
# The Python that has SAELens, if it is installed: its tests need it.
SAELENS = SPILE_SAELENS_PYTHON="$$(test -f $(VENV)/.saelens && echo $(CURDIR)/$(VENV)/saelens/bin/python)"

.PHONY: demo test suite lint style types chaos chaos-kills chaos-faults chaos-buckets chaos-fleets chaos-models chaos-fuzz chaos-rest bench docs wheel lock clean

demo: $(VENV)/.spile
	$(BIN)/spile extract --model demo --corpus demo --taps resid_post:9,mlp_out:9 \
	  --max-docs 25 --seq-len 512 --unit-tokens 3k --out $(OUT)

# The type checker is one process of many seconds, so the suite runs beside it.
test: style $(VENV)/.saelens
	$(MAKE) -j 2 types suite

suite: $(VENV)/.dev
	$(SAELENS) $(BIN)/pytest -n 3 --dist worksteal

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/pyright src

# Tests that are too long or too varied for `make test`, by subject. Each target runs by itself.
# Of tests/chaos all tests run, of these only the ones marked `full`; chaos-rest runs what no list
# names. tests/test_makefile.py checks that every such test belongs to one target.
CHAOS := chaos-kills chaos-faults chaos-buckets chaos-fleets chaos-models chaos-fuzz chaos-rest
KILLS := tests/e2e/test_world.py tests/e2e/test_pool.py tests/e2e/test_pool_combinations.py tests/e2e/test_shuffle_docs.py tests/rollouts tests/run
BUCKETS := tests/contracts tests/objects tests/e2e/test_buckets.py tests/e2e/test_hub.py tests/e2e/test_remote_inputs.py
FLEETS := tests/fleet tests/launch tests/e2e/test_launch.py
MODELS := tests/models tests/check tests/compile
MESHES := tests/run/test_mesh.py
FULL = $(BIN)/pytest -n 2 --dist worksteal --chaos-full

chaos: $(CHAOS)

chaos-kills: $(VENV)/.dev
	$(FULL) tests/chaos/test_kill.py tests/chaos/test_features.py tests/chaos/test_gradients.py tests/chaos/test_lens.py tests/chaos/test_pairs.py tests/chaos/test_world_kill.py tests/chaos/test_hostile.py
	$(FULL) -rP tests/chaos/test_faults.py -k thousand
	$(FULL) -m full $(KILLS) $(MESHES:%=--ignore %)

# Faults at every system call, and power cuts; -rP prints what each has tried.
chaos-faults: $(VENV)/.dev
	$(FULL) -rP tests/chaos/test_faults.py -k "not thousand"
	$(FULL) -rP tests/chaos/test_power.py

chaos-buckets: $(VENV)/.dev
	$(FULL) tests/chaos/test_buckets.py tests/chaos/test_hub.py
	$(FULL) -m full $(BUCKETS)

chaos-fleets: $(VENV)/.dev
	$(FULL) tests/chaos/test_ray.py tests/chaos/test_shares.py tests/chaos/test_slurm.py tests/chaos/test_ssh.py tests/chaos/test_supervised.py
	$(FULL) -m full $(FLEETS)

# Meshes one after the other: each is a process with eight devices.
chaos-models: $(VENV)/.dev $(VENV)/.saelens
	$(SAELENS) $(FULL) -m full $(MODELS)
	$(BIN)/pytest --chaos-full $(MESHES)

# Other examples every time, for so many seconds in all; its summary names the seeds.
FUZZ_SECONDS ?= 1800
chaos-fuzz: $(VENV)/.dev
	SPILE_FUZZ_SECONDS=$(FUZZ_SECONDS) $(FULL) tests/security

chaos-rest: $(VENV)/.dev $(VENV)/.saelens
	$(BIN)/pyright
	$(SAELENS) $(FULL) -m full tests $(patsubst %,--ignore %,tests/chaos $(KILLS) $(BUCKETS) $(FLEETS) $(MODELS))

bench: $(VENV)/.dev
	$(BIN)/python bench/cpu.py

docs: $(VENV)/.dev
	$(BIN)/python scripts/make_reference.py docs/reference
	$(BIN)/zensical build --strict --clean

# With what it was tested with: a bill of materials for each lock of docker/.
wheel: $(VENV)/.dev
	$(BIN)/pip wheel -q --no-deps -w dist .
	$(BIN)/python scripts/make_sbom.py dist docker/requirements-*.txt

# What the images install, by SHA-256. Versions stay as they are unless LOCK=--upgrade.
LOCK =
COMPILE = $(BIN)/uv pip compile -q --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
  --no-emit-index-url --custom-compile-command 'make lock' $(LOCK)
IMAGE := --extra cloud --extra hub --extra chat --extra demo

lock: $(VENV)/.dev
	$(BIN)/pip install -q uv==0.13.7
	$(COMPILE) $(IMAGE) pyproject.toml -o docker/requirements-cpu.txt
	$(COMPILE) $(IMAGE) --extra gpu -c docker/requirements-cpu.txt pyproject.toml -o docker/requirements-cuda.txt
	$(COMPILE) $(IMAGE) --extra tpu -c docker/requirements-cpu.txt pyproject.toml -o docker/requirements-tpu.txt
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" \
	  | $(COMPILE) - -o docker/requirements-build.txt

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
