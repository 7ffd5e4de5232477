# make demo    set up everything on this machine (a minute), and run the main job (less than one)
# make test    set up everything, then lint, types and the quick tests (4 min)
# make lint    lint and types        make bench   measure this machine
# make quick   only the quick tests
# make check   lint and types, then these tests and the slower ones, with coverage by line and branch
#              (15 min); make check-rest: only the slower ones, without coverage (5 min)
# make costs   what the tests cost: CPU per folder, and the slowest files (8 min)
# make pythons quick tests on every Python from 3.10 that this machine has, each with a daemon (5 min)
# make soak    long tests, the attacks among them (23 min)
# make fuzz    damaged files and frames, random runs (6 min)
# make soak-hour   jobs of all kinds and all that can happen to them, for an hour (seconds=600 seed=2
#              record=FILE.json: for less, otherwise, and with figures)
# make guided seconds=3600   coverage-guided fuzzing of core, daemon and formats, each for so long
# make attack  hostile users, each beside an honest client whose times are measured (8 min; needs root;
#              table=docs/SECURITY.md writes the table anew)
# make asan    the C core under AddressSanitizer and UBSan; make tsan: ThreadSanitizer
# make interop pyrecordio, TensorFlow and others read files of ffserve, and ffserve reads theirs;
#              Grain and Hugging Face datasets over files of ffserve; programs written for ffrecord;
#              the packages of the benchmark; remote files from Ceph's gateway of S3
#              (installs gigabytes; says why a test is skipped)
# make nodes   a cache network of nginx for several daemons (1 min; brings nginx)
# make page    the status page in Chromium (1 min; brings Chromium, 300 MB; screenshots=docs/images
#              draws the pictures of the documents anew)
# make ray     Ray sessions, reading and writing (2 min; brings Ray, 300 MB)
# make spark   Spark sessions, readers and writers (2 min; brings Java and pyspark, 500 MB)
# make stores  remote files from servers of S3, SFTP, HDFS, Google Cloud Storage and Azure, and longer
#              tests of the store (18 min; brings Java and Hadoop, 500 MB)
# make systemd boot a systemd in a container: install the service, use it, damage it, mend it by what
#              `ffserve doctor` prints, remove it; a real Prometheus (14 min; needs root; seconds=300:
#              kill the daemon every 5 s for so long)
# make upgrades the last release's clients and daemon with today's (2 min; builds it from the history,
#              or takes FFSERVE_LAST=WHEEL)
# make wheels  wheels for x86_64 and aarch64 and every Python, in dist/ (1 min; brings a compiler,
#              450 MB); make deb: Debian packages of them (2 min)
# make release both, and their tests: installed in empty systems, on aarch64 under qemu, and in
#              containers of the image (30 min; needs root)
# make view    record files as a file system: a million samples, storage that hangs, other users
#              (3 min; needs root and /dev/fuse, brings fuse3)
# make conda   a conda package of the source distribution in dist/, by rattler-build
# make site    the documents as a site in dist/site, with the tutorials as they ran (5 min; brings
#              Sphinx, and 80 MB of pictures and sounds)
# make install install ffserve in /opt/ffserve, for all users, with the service (needs root);
#              make uninstall removes both (options=--purge: also changed settings)
# make figures measure every figure of README.md anew and write it there (an hour with all peers;
#              after an interruption it goes on; options="--disk-limit …" and others are handed on)
# make docs    draw docs/images/architecture.svg (needs graphviz)
# make clean   remove what was built (make distclean: .venv as well)

python := .venv/bin/python
pytest := $(python) -m pytest
# Two processes per core, because tests wait a third of the time, and at most 8. One that has run out
# of tests takes half of what another has left.
workers := $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
parallel := -n $(workers) --dist worksteal

# The tests that `make test` leaves out; a variant of one may belong to a longer run.
slow := -m 'check and not soak and not fuzz and not interop and not stores and not nodes and not view'

# Hundreds of processes run the same sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint check check-rest costs pythons interop ray spark bench figures docs soak fuzz guided asan tsan setup clean distclean
.PHONY: stores nodes systemd upgrades install uninstall page soak-hour wheels deb release view attack
.PHONY: quick conda site
.DEFAULT_GOAL := demo

setup:
	@bash .ci/setup

demo: setup
	@$(python) -m ffserve demo

lint: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@.venv/bin/clang-format --dry-run --Werror ffserve/engine/*/*.[ch]
	@$(python) -m mypy

check: lint
	@bash .ci/setup --check
	@mkdir -p .coverage && rm -f .coverage/*
	@FFSERVE_NEW_EXAMPLES=1 $(python) -m coverage run -m pytest -q $(parallel) --timeout 600
	@FFSERVE_NEW_EXAMPLES=1 $(python) -m coverage run -m pytest -q $(parallel) --timeout 600 $(slow)
	@$(python) -m coverage combine -q
	@$(python) -m coverage report

# run_tests TARGET,OPTIONS: a test that fails beside others and passes alone is named, and does not
# fail the run.
define run_tests
$(pytest) -q $(parallel) $(2); code=$$?; \
if [ $$code = 0 ]; then echo "make $(1): passed"; exit; fi; \
echo "make $(1): those that failed are run again, alone"; \
if $(pytest) -q -x --last-failed --last-failed-no-failures none $(2); then \
    echo "make $(1): passed, but some tests failed beside others (see above): they are flaky"; \
else \
    echo "make $(1): FAILED (see above)"; exit $$code; \
fi
endef

# The files of the tests are compiled once, while types are checked, and not by each process.
test: setup
	@$(pytest) -q --collect-only >/dev/null 2>&1 & \
	$(MAKE) --no-print-directory lint || { code=$$?; wait; exit $$code; }; \
	wait; \
	$(call run_tests,test)

quick: setup
	@$(call run_tests,quick)

check-rest:
	@bash .ci/setup --check
	@$(call run_tests,check-rest,$(slow))

costs: setup
	@$(pytest) -q $(parallel) --costs
	@$(pytest) -q $(parallel) --costs $(slow)

pythons: setup
	@bash .ci/pythons

interop:
	@bash .ci/setup --bench --ceph
	@$(pytest) -q -rs -m interop --timeout 0

ray:
	@bash .ci/setup --ray
	@$(pytest) -q -m ray tests/ray --timeout 300

spark:
	@bash .ci/setup --spark
	@$(pytest) -q -m spark tests/spark --timeout 300

page:
	@bash .ci/setup --page
	@SCREENSHOTS=$(screenshots) $(pytest) -q -rs -m page tests/page --timeout 300

stores:
	@bash .ci/setup --stores
	@$(pytest) -q -rs -m 'stores and not interop' tests/store --timeout 300

nodes:
	@bash .ci/setup --nodes
	@$(pytest) -q -rs -m nodes tests/nodes --timeout 300

view:
	@bash .ci/setup --view
	@$(pytest) -q -rs -m view tests/view --timeout 1200

systemd:
	@bash .ci/setup --systemd
	@SECONDS_OF_KILLS=$(seconds) $(pytest) -q -rs -m systemd tests/systemd --timeout 600

upgrades: setup
	@$(pytest) -q -rs -m upgrades tests/upgrades --timeout 300

wheels:
	@bash .ci/setup --wheels
	@$(python) .ci/wheels.py

deb: wheels
	@$(python) .ci/deb.py

conda: wheels
	@$(python) .ci/conda.py

site:
	@bash .ci/setup --site
	@$(python) .ci/site.py
	@$(pytest) -q -m site tests/site

release: deb
	@bash .ci/setup --systemd --release
	@$(pytest) -q -rs -m wheels tests/release --timeout 1200

# A Python that all users may run. What is built is a copy, so that root leaves nothing here.
prefix ?= /opt/ffserve
python3 ?= /usr/bin/python3
install:
	@[ "$$(id -u)" = 0 ] || { echo "make install: only root may do this; use sudo" >&2; exit 2; }
	@[ -x $(prefix)/bin/python ] || $(python3) -m venv $(prefix)
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && umask 022 && \
	    cp -R LICENSE README.md docs ffserve pyproject.toml systemd "$$copy" && \
	    FFSERVE_CHECKOUT="$(CURDIR)" $(prefix)/bin/python -m pip install --quiet \
	        --disable-pip-version-check "$$copy[metrics]"
	@$(prefix)/bin/ffserve install-service

uninstall:
	@[ "$$(id -u)" = 0 ] || { echo "make uninstall: only root may do this; use sudo" >&2; exit 2; }
	@$(prefix)/bin/ffserve uninstall-service $(options)
	@[ ! -e $(prefix)/pyvenv.cfg ] || rm -rf $(prefix)

soak: setup
	@FFSERVE_NEW_EXAMPLES=1 $(pytest) -q -m 'soak or attack' --timeout 600

# The hour has a seed of its own each time, unless one is given.
soak-hour: seconds = 3600
soak-hour: setup
	@$(python) tests/soak/everything.py --seconds $(seconds) --seed $(or $(seed),$$(date +%s)) \
	    $(if $(record),--record $(record))

fuzz: setup
	@FFSERVE_NEW_EXAMPLES=1 $(pytest) -q -m fuzz --timeout 600

attack: setup
	@ATTACK_TABLE=$(table) $(pytest) -q -rs -m attack tests/attack --timeout 300

seconds ?= 60
guided: setup
	@bash tests/fuzzing/run.sh $(seconds)

asan: setup
	@bash tests/sanitize.sh address

tsan: setup
	@bash tests/sanitize.sh thread

bench:
	@bash .ci/setup --bench
	@mkdir -p .bench
	@$(python) -m benchmarks --record .bench/bench.json --picture .bench/bench.png

figures:
	@bash .ci/setup --bench
	@mkdir -p .bench
	@$(python) -m benchmarks --seconds 0.5 $(options) --record .bench/bench.json --resume \
	    --picture docs/images/bench.png --readme README.md --readme docs/TORCH.md \
	    --readme docs/BENCHMARKS.md
	@cp .bench/bench.json docs/bench.json

docs: setup
	@bash docs/images/draw

clean:
	rm -rf build dist ffserve/engine/*.so ffserve/engine/*.o ./*.egg-info
	rm -rf .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .bench
	rm -f .venv/.stamp-*
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv
