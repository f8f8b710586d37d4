# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# One door. `make help` lists what it opens.

BUILD ?= build
USER_BUILD := $(BUILD)/user
KVER ?=
JOBS ?= $(shell nproc)

.PHONY: all help deps kmod user runc packages docs lint fuzz check check-fast check-debug check-release check-packages conformance demo soak faults walk shapes cuts bench-datapath bench-migrate bench-failover clean

all: deps			## build everything
	@$(MAKE) --no-print-directory -j3 kmod user runc	# one waits for an archive, another for one processor's linker

help:				## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps:				## install the distribution packages that are missing
	@scripts/deps

kmod: deps			## migr.ko for the kernels that tests use, or KVER=
	@scripts/build-kmod $(KVER)

user: deps			## libmigr, migrd, migrctl, CRIU plugin, programs
	@mkdir -p $(USER_BUILD)
	@cmake -S . -B $(USER_BUILD) -G Ninja >$(BUILD)/cmake.log 2>&1 || { cat $(BUILD)/cmake.log; exit 1; }
	@ninja -C $(USER_BUILD) -t cleandead >/dev/null	# what nothing builds any more must not look built
	@ninja -C $(USER_BUILD) -j$(JOBS) --quiet

runc: deps			## runc with our patches, build/runc/runc
	@scripts/build-runc

packages: user runc		## Debian packages of everything, build/packages/*.deb
	@scripts/build-packages

check-fast: user		## tests without a VM (two minutes)
	@scripts/check --fast

check: all			## every test, in VMs too (25 to 35 minutes)
	@scripts/check

check-debug: deps		## the module in a kernel with KASAN, lockdep, kmemleak and KCOV (the first time half an hour)
	@v=$$(scripts/build-debug-kernel) && scripts/test-kmod "$$v"

check-release: all		## whatever the documents have make do, one after the other (a night; ONLY=regex: of it)
	@tests/docs/make_test $(if $(ONLY),'$(ONLY)')

check-packages: all		## the packages: lintian, on a minimal Debian, on a host as a VM; the documents' commands (root; 30 minutes)
	@scripts/build-packages --lint
	@tests/packages/root_test
	@tests/e2e/packages_test.sh
	@tests/e2e/pages_test.sh

docs:				## the pages of docs/ as HTML and manual pages, build/docs
	@scripts/deps python3-sphinx python3-myst-parser
	@sphinx-build -q -W -b html -d $(BUILD)/docs/doctrees docs $(BUILD)/docs/html
	@sphinx-build -q -W -b man -d $(BUILD)/docs/doctrees docs $(BUILD)/docs/man
	@echo "$(BUILD)/docs/html/index.html $(BUILD)/docs/man/"

lint: user			## shellcheck, clang-format, mandoc, checkpatch, sparse, clang-tidy (30 minutes; TOOLS="shell kernel": these)
	@scripts/lint $(TOOLS)

TIME ?= 600
fuzz: deps kmod			## mutated input for the parsers of what comes from outside, and for the module; TIME=600 seconds each, TARGETS="tree calls": only these parsers
	@scripts/fuzz $(TIME) $(TARGETS)
	@$(if $(TARGETS),,MIGR_FUZZ_S=$(TIME) scripts/test-kmod --only fuzz "$$(scripts/kernel-versions | head -n 1)")

conformance: kmod user		## rdma-core's tests with and without libmigr (20 minutes)
	@tests/conformance/run $(KVER)

demo: all			## the main job, to be watched: build/demo/
	@scripts/demo

N ?= 20
soak: all			## N=20 migrations to and fro, and what they leave; FAULTS=3: a fault in every third
	@FAULTS=$(FAULTS) scripts/soak $(N)

faults: all			## every fault point in real hosts, POINTS=regex (hours)
	@scripts/faults $(if $(POINTS),'$(POINTS)')

walk: user			## every fault point with modelled hosts (minutes)
	@tests/faults/walk $(USER_BUILD)
	@tests/faults/walk $(USER_BUILD) --pairs

shapes: all			## every step of the end-to-end tests, and longer walks (100 minutes)
	@tests/e2e/walk

CUTS ?= 200
cuts: all			## 2000 failures of modelled links, and CUTS=200 between hosts, half of a cable (100 minutes)
	@scripts/cuts $(CUTS)

bench-datapath: user		## cycles per call with and without libmigr (20 s)
	@mkdir -p $(BUILD)/bench
	@$(USER_BUILD)/bench/datapath --libmigr $(USER_BUILD)/libmigr/libmigr.so --json $(BUILD)/bench/datapath.json

bench-migrate: all		## what a migration costs, in VMs: table and build/bench/migrate.* (40 minutes; QUICK=1: 8)
	@bench/migrate

bench-failover: all		## what a backup link costs and a cut cable does, in VMs: build/bench/failover.* (20 minutes; QUICK=1: 5)
	@bench/failover

clean:				## remove the build folder
	rm -rf $(BUILD)
