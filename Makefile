# Every target sets up .venv by itself when it is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COLLECTED := .venv/.collected
# Else each of a thousand processes compiles the package, and each pytest rewrites it once more.
unexport PYTHONDONTWRITEBYTECODE
# Much of a test of real processes is waiting: on two cores, four at a time. Pure tests do not wait.
PARALLEL := -n 4 --dist worksteal
PURE_PARALLEL := -n 3 --dist worksteal

.PHONY: demo test test-slurm test-rest flaky mutate lint check docs simulate nightly oldest newest soak bench clean network-tools slurm-tools browser-tools
.DEFAULT_GOAL := help

help:
	@echo "make demo     train on 3 simulated nodes, kill some, show what happened"
	@echo "make test     every test, real processes included; ORDER=reversed or ORDER=SEED changes the order"
	@echo "make test-slurm  those that run on a real Slurm, which they bring up themselves"
	@echo "make flaky TESTS=... N=50  runs tests N times under a random load (without TESTS: hours)"
	@echo "make mutate MODULES=...  removes each guard of these modules in turn; prints those that no test misses"
	@echo "make check    lint, types and the pure tests (under a minute)"
	@echo "make docs     the documentation's site in docs/_build/html, with warnings as errors"
	@echo "make simulate SEEDS=N FIRST=F  N schedules of faults against the rendezvous, from seed F on"
	@echo "make nightly  100,000 schedules of faults against the rendezvous, new ones every day, longer fuzzing, make oldest and make newest"
	@echo "make oldest   the pure tests and a few of real processes with the oldest torch that pyproject.toml promises, in a venv of its own"
	@echo "make newest   the same with the newest torch that installs"
	@echo "make soak     a hundred kills in one job, two thousand power cuts, ten minutes of mixed faults, and what make test leaves out"
	@echo "make bench    speed, as ratios measured side by side"

# pip would compile 14,000 modules in one thread, for a minute. Many processes import those of the second line at once.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("elastic-resume needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11, say." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'import hypothesis, pytest, torch._dynamo, torch.distributed.checkpoint'
	touch $@

# Else each process of xdist compiles all tests and what they import, at the same time as the others.
$(COLLECTED): $(READY)
	-@$(BIN)/python -m pytest -q --collect-only tests >/dev/null 2>&1
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint $(COLLECTED)
	$(BIN)/python -m pytest -q $(PURE_PARALLEL) -m 'not cluster and not slow'

docs: $(READY)
	@$(BIN)/python -c 'import sys; sys.exit("make docs needs Python 3.11 or newer; .venv has " + sys.version.split()[0] + ". Remove .venv and set PYTHON=python3.11." if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html

# For tests that break the links and disks of simulated nodes. What cannot be installed here, those tests name.
network-tools:
	-@if ! PATH="$$PATH:/usr/sbin:/sbin" sh -c 'for tool in ip tc nft nsenter setpriv openssl mkfs.ext4 mkfs.xfs; do command -v $$tool || exit; done' >/dev/null \
	&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 util-linux openssl nftables e2fsprogs xfsprogs; \
	fi

# A real Slurm, which is started by the tests: nothing of it runs otherwise.
slurm-tools: network-tools
	-@if ! PATH="$$PATH:/usr/sbin:/sbin" sh -c 'command -v slurmctld && command -v slurmd && command -v munged' >/dev/null \
	&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; \
	fi

# For tests that look at the page of a report.
browser-tools:
	-@if ! sh -c 'command -v chromium || command -v google-chrome' >/dev/null \
	&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	fi

# One cluster for all of its tests, so they are one process of their own.
test-slurm: $(COLLECTED) slurm-tools
	$(BIN)/python -m pytest -q tests/system/slurm --durations=5

test-rest: $(COLLECTED) network-tools browser-tools
	$(BIN)/python -m pytest -q $(PARALLEL) --durations=25 --ignore=tests/system/slurm

# Slurm's tests wait nearly all of their time: beside the others they cost next to none.
test: $(COLLECTED) slurm-tools browser-tools
	@slurm_log=$$(mktemp); trap 'rm -f $$slurm_log' EXIT; trap 'kill $$slurm' INT TERM; \
	$(MAKE) --no-print-directory test-slurm >$$slurm_log 2>&1 & slurm=$$!; \
	$(MAKE) --no-print-directory test-rest; status=$$?; \
	wait $$slurm || status=1; cat $$slurm_log; exit $$status

# Tests with real processes, unless TESTS names others.
TESTS ?= tests -m cluster --ignore=tests/system/slurm
N ?= 50
flaky: $(READY) network-tools browser-tools
	$(BIN)/python -m tests.support.flaky --runs $(N) $(TESTS)

# Some ten minutes for a package. A line of a module may be named: elastic_resume/slots/ipc.py:69.
MODULES ?= elastic_resume/slots elastic_resume/checkpoint elastic_resume/rendezvous/net \
	elastic_resume/agent/workers elastic_resume/state/load_objects.py elastic_resume/restore
mutate: $(READY)
	$(BIN)/python -m tests.support.mutation $(MODULES)

# A failing schedule prints the command that plays it again. FIRST=0 plays those that `make check` begins with.
FIRST ?= $(shell echo $$(( $$(date +%s) / 86400 * 100000 )))
SEEDS ?= 100000
simulate: $(READY)
	$(BIN)/python -m tests.support.rendezvous_sim --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.support.rendezvous_sim --seeds $(SEEDS) --first $(FIRST) --wide

nightly: simulate
	ELASTIC_RESUME_FUZZ_CASES=20000 $(BIN)/python -m pytest -q tests/unit/rendezvous/net/test_protocol_fuzz.py \
		tests/unit/report/test_generations.py --timeout 3600
	$(MAKE) --no-print-directory oldest newest

# Several gigabytes each where the index has torch with CUDA only; TORCH_INDEX names another one.
oldest: TORCH = torch==$(shell sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml).0
newest: TORCH = torch>=2
oldest newest: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$@
	sed 's/^torch==.*/$(TORCH)/' constraints.txt > .venv-$@/constraints.txt
	.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix --extra-index-url ,$(TORCH_INDEX)) --constraint .venv-$@/constraints.txt --upgrade torch --editable '.[dev]'
	.venv-$@/bin/python -m pytest -q $(PURE_PARALLEL) -m 'not cluster and not slow'
	.venv-$@/bin/python -m pytest -q $(PARALLEL) $(patsubst %,tests/integration/test_%.py,run_command restore training warm_start)

# Files with tests marked soak, and files whose tests do more there.
SOAK_TESTS := $(patsubst %,tests/docs/test_%.py,blocks examples ports) tests/system/disk/test_power_loss.py \
	tests/system/kubernetes/test_pods.py tests/system/network tests/unit/mechanisms/curves/exporters tests/unit/rendezvous/test_worlds_model.py tests/unit/slots/test_interleavings.py $(patsubst %,tests/integration/test_%.py, \
	accelerate archive archived_jobs chaos compile_cache curves demolition dir_lock end_to_end epochs every_fault failures forkserver going_back graceful_shutdown launch leaks lightning lost_nodes no_step_lost on_event output own_loggers preemption proof pytest_plugin rehearsal report_browser run_command sharded state_kinds \
	standby streams survivors testing_cleanup torchrun torn_copies transformers trl world_changes)
SOAK_KILLS ?= 100
CHAOS_S ?= 600
soak: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev,trl]'
	ELASTIC_RESUME_SOAK_KILLS=$(SOAK_KILLS) ELASTIC_RESUME_POWER_CUTS=2000 ELASTIC_RESUME_CHAOS_S=$(CHAOS_S) $(BIN)/python -m pytest -q $(SOAK_TESTS) --timeout 3600

bench: $(READY)
	$(BIN)/python benchmarks/start.py --repetitions 2
	$(BIN)/python benchmarks/recovery.py --kills 2 --only ours,tuned
	$(BIN)/python benchmarks/checkpoint.py --sizes 100 --only stalls,commits,resumes --repetitions 3
	$(BIN)/python benchmarks/goodput.py --only ours --minutes 1 --baseline-minutes 0.5

clean:
	rm -rf .venv .venv-oldest .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-run docs/_build
