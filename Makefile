# The two commands: `make train` and `make test`. Both install what they need into .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
READY := $(VENV)/.ready
ARGS ?=
SMOKE := tests/test_import.py tests/test_house_rules.py tests/test_recipes.py tests/learn/test_losses.py \
	tests/learn/test_advantage.py tests/learn/test_rewards.py tests/rollout/test_segments.py \
	tests/rollout/test_collector.py tests/memory/test_rnn.py tests/memory/test_state_store.py \
	tests/policies/test_normalization.py tests/checkpoint/test_serialization.py tests/report/test_alarms.py
export OMP_NUM_THREADS ?= 1
# Processes that tests start would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-gpu smoke slow lint docs museum mutants check-peers check-trainers versions clean

train: $(RUNNABLE)
	$(BIN)/holdfast train $(ARGS)

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# A sample of the tests of every package, in a minute.
smoke: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow" $(SMOKE)

slow: $(READY) $(VENV)/.envpool $(VENV)/tensordict-oldest/.ready $(VENV)/peers/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow
	PYTHONPATH=$(CURDIR)/$(VENV)/tensordict-oldest $(BIN)/python -m pytest -n 2 -m "not slow" \
		--ignore tests/memory/kernels tests/memory tests/rollout tests/learn \
		tests/policies/test_lstm_wrapper.py tests/policies/test_recurrent_policy.py tests/policies/test_binding.py \
		tests/check/adapters/test_libraries.py
	PYTHONPATH=$(CURDIR)/$(VENV)/peers $(BIN)/python -m pytest -n 2 tests/integrations tests/play/test_sb3_policy.py \
		tests/play/test_rsl_rl_policy.py tests/integration/test_examples.py

# On a machine with a GPU, with what is installed there: nothing is downloaded. Kernels, graphs, laws, learning.
test-gpu:
	PYTHONPATH=$(CURDIR)/src:$(PYTHONPATH) $(PYTHON) -m pytest -m gpu -p no:cacheprovider $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# The reference pages: configuration, metrics, command line.
docs: $(READY)
	$(BIN)/python tools/reference.py

# docs/museum: measures what the check catches and passes, and draws the pictures; ARGS=traps: the traps alone.
museum: $(READY)
	$(BIN)/python tools/museum.py $(ARGS)

# Mutation testing of a sample; ARGS="learn --number 0": every mutant of one folder.
mutants: $(VENV)/.mutmut
	$(BIN)/python tools/mutants.py $(ARGS)

# docs/museum/peers.md: the laws on other libraries, in a separate environment with the tensordict they need;
# docs/museum/conformance.md: the laws on their trainers, each in an environment of its own.
PEERS := .venv-peers
TRAINERS := $(addprefix $(PEERS)-trainers/,$(addsuffix /.ready,cleanrl sb3 rsl_rl skrl rl_games torchrl tianshou sample_factory))
check-peers: $(PEERS)/.ready check-trainers
	$(PEERS)/bin/python tools/check_peers.py

check-trainers: $(TRAINERS)
	$(PEERS)-trainers/cleanrl/bin/python tools/check_trainers.py $(PEERS)-trainers

# The pins of what is tested do not bind the libraries; rl_games and Sample Factory ask for an old Gymnasium, tianshou for
# an old virtualenv, which they do not need.
$(PEERS)-trainers/%/.ready: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep --invert-match '^tensordict==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable . $(REQUIRES_$*)
	$(if $(ALONE_$*),$(@D)/bin/python -m pip install --quiet --no-deps $(ALONE_$*))
	touch $@

REQUIRES_sb3 := sb3-contrib==2.9.2
REQUIRES_rsl_rl := rsl-rl-lib==5.5.1
REQUIRES_skrl := skrl==2.1.1
REQUIRES_rl_games := tensorboardX tensorboard setproctitle watchdog opencv-python-headless
ALONE_rl_games := rl-games==1.6.5
REQUIRES_torchrl := torchrl==0.14.1 'tensordict>=0.14,<0.15' hoptorch==0.1.4
REQUIRES_tianshou := 'deepdiff<8' h5py numba 'overrides<8' 'pandas<3' pettingzoo sensai-utils tensorboard tqdm matplotlib
ALONE_tianshou := tianshou==2.0.1
REQUIRES_sample_factory := colorlog signal-slot-mp tensorboardX
ALONE_sample_factory := sample-factory==2.1.1

$(PEERS)/.ready: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	grep --invert-match '^tensordict==' constraints.txt > $(PEERS)/constraints.txt
	$(PEERS)/bin/python -m pip install --quiet --constraint $(PEERS)/constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --constraint $(PEERS)/constraints.txt --editable . \
		sb3-contrib==2.9.2 torchrl==0.14.1 'tensordict>=0.14,<0.15' hoptorch==0.1.4
	touch $@

# docs/dev/versions.md: the tests of what runs in other projects, with the oldest and the newest packages. Each of the two
# environments downloads a torch with CUDA, several GB.
OLDEST := .venv-oldest
NEWEST := .venv-newest
PYTHON_OLDEST ?= python3.10
PYTHON_NEWEST ?= python3.13
VERSIONS_TESTS := tests/test_nn.py tests/memory tests/rollout tests/learn tests/policies tests/check tests/test_errors.py
versions: $(OLDEST)/.ready $(NEWEST)/.ready
	failed=0; for each in $(OLDEST) $(NEWEST); do \
		$$each/bin/python -m pip freeze | grep -iE '^(torch|tensordict|numpy|gymnasium)=='; \
		$$each/bin/python -m pytest -q -m "not slow" $(ARGS) $(VERSIONS_TESTS) || failed=1; \
	done; exit $$failed

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]' setuptools pygame
	touch $@

$(NEWEST)/.ready: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON_NEWEST) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]' 'pytest<9' pygame-ce
	touch $@

# torch first and pinned: a range alone would pull gigabytes of CUDA packages on a machine without a GPU.
$(RUNNABLE): pyproject.toml constraints.txt
	@echo "Setting up .venv with torch and what training needs: one or two minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(READY): $(RUNNABLE)
	@echo "Adding linters, test tools and environments of other packages to .venv: two minutes, once."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# 750 MB of games, for the slow tests only.
$(VENV)/.envpool: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[envpool]'
	touch $@

$(VENV)/.mutmut: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt mutmut==3.8.1
	touch $@

# An older tensordict, which `make slow` puts in front of the environment, and libraries that need it; the oldest: `make versions`.
$(VENV)/tensordict-oldest/.ready: $(READY) Makefile
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(dir $@) tensordict==0.14.0 \
		torchrl==0.14.1 sb3-contrib==2.9.2 stable-baselines3==2.9.2 pandas==3.1.1
	touch $@

# Trainers that take parts of ours, with what they import beyond the environment.
$(VENV)/peers/.ready: $(READY) Makefile
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(dir $@) --constraint constraints.txt \
		sb3-contrib stable-baselines3 pandas rsl-rl-lib gitpython gitdb smmap skrl
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS)-trainers $(OLDEST) $(NEWEST) mutants .pytest_cache .ruff_cache .hypothesis
