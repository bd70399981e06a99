# SPDX-License-Identifier: Apache-2.0
# Everything a newcomer or CI needs; `make` alone prints the list.

GO      ?= go
BIN     := bin/sluice
export CGO_ENABLED = 0

.DEFAULT_GOAL := help
.PHONY: help build install uninstall demo test test-unit test-vm soak generate check-generated lint fuzz bench bench-check bench-shares bench-docs bench-agreement deps deps-dev clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the static binary bin/sluice
	$(GO) build -o $(BIN) ./cmd/sluice

PREFIX ?= /usr/local
install: build ## install program, manual, completions and units below PREFIX (default /usr/local)
	install -D -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/sluice
	$(BIN) docs man $(DESTDIR)$(PREFIX)/share/man/man1
	for shell in bash zsh fish; do $(BIN) completion $$shell > bin/completion.$$shell || exit 1; done
	install -D -m 644 bin/completion.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/sluice
	install -D -m 644 bin/completion.zsh $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_sluice
	install -D -m 644 bin/completion.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/sluice.fish
	for unit in sluice sluice-accelerate; do sed 's,/usr/local,$(PREFIX),' packaging/$$unit.service | \
	  install -D -m 644 /dev/stdin $(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit.service || exit 1; done

uninstall: ## remove what install put there; the configuration and the state stay
	cd $(DESTDIR)$(PREFIX) && rm -f bin/sluice share/man/man1/sluice.1 share/man/man1/sluice-*.1 lib/systemd/system/sluice.service lib/systemd/system/sluice-accelerate.service \
	  share/bash-completion/completions/sluice share/zsh/site-functions/_sluice share/fish/vendor_completions.d/sluice.fish

demo: build ## balance and translate real traffic in namespaces; ends by itself, leaves nothing (root)
	$(BIN) demo

test: deps ## every test floor, privileged ones included (root); skips say why
	@.ci/test

test-unit: ## the tests that need no rights, with the race detector off
	$(GO) test -short ./...

test-vm: deps-dev ## load and test the eBPF datapath on Debian's 6.1 kernel under QEMU (VMFLAGS=-short: less)
	$(GO) test $(VMFLAGS) -count=1 -timeout 60m -tags vm ./e2e/vm/...

SOAK ?= 1000000
SEED ?= 1
soak: deps ## the long random runs: SOAK packets (default a million) a scenario and hook, others with SEED; takes hours (root)
	SLUICE_MODEL_PACKETS=$(SOAK) SLUICE_MODEL_SEED=$(SEED) SLUICE_MODEL_PROGRAMS=exact $(GO) test -count=1 -timeout 0 -v -run TestModelAgrees ./datapath/ebpf
	SLUICE_HOSTILE_PACKETS=$(SOAK)0 SLUICE_HOSTILE_SEED=$(SEED) SLUICE_MODEL_SEED=$(SEED) SLUICE_LEAK_RUNS=50 $(GO) test -count=1 -timeout 0 -v -run 'TestHostilePackets|TestNothingLeaks' ./datapath/ebpf
	$(GO) test -count=1 -timeout 0 -v -run TestSYNFlood ./datapath/ebpf -flood 30s -flood-rate 0
	SLUICE_ORACLE_SECONDS=3600 SLUICE_ORACLE_SEED=$(SEED) $(GO) test -count=1 -timeout 0 -v -run TestOracle ./e2e/oracle
	SLUICE_SICK_COUNT=500 SLUICE_SICK_SEED=$(SEED) $(GO) test -count=1 -timeout 0 -v ./e2e/sick
	SLUICE_KILLS=200 $(GO) test -count=1 -timeout 0 -v -run TestKillWhileApplying ./e2e

generate: deps-dev ## compile the BPF programs, regenerate schema, docs and man pages
	$(GO) generate ./...

check-generated: generate ## fail when a generated file is not current
	git diff --exit-code --stat
	@test -z "$$(git status --porcelain)" || { git status --short; exit 1; }

lint: ## gofmt, vet and staticcheck
	@out=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$out" || { echo "not gofmt'ed:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

FUZZTIME ?= 20s
fuzz: ## run every fuzz target for FUZZTIME (default 20s)
	@for f in $$(grep -rl --include='*_test.go' '^func Fuzz' .); do \
	  for t in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' $$f); do \
	    echo "== $$(dirname $$f) $$t"; $(GO) test -run '^$$' -fuzz "^$$t\$$" -fuzztime $(FUZZTIME) $$(dirname $$f) || exit 1; \
	  done; done

bench: build ## measure the datapaths, and others, side by side (root, quiet machine)
	@packaging/deps.sh bench
	$(BIN) bench packets

bench-check: build ## compare the eBPF rows of five suites with committed shares of the limit row (root, quiet machine)
	$(BIN) bench guard

bench-shares: build ## measure the shares that bench-check compares with (root, quiet machine)
	$(BIN) bench guard --write

bench-docs: build ## write docs/measurements/benchmarks.md from the committed results
	$(BIN) bench docs

AGREE ?= generator drop rules ports scale
bench-agreement: build ## measure suites twice in a row and write how far they agree (root, quiet machine)
	@first=$$(mktemp -d) && trap 'rm -rf $$first' EXIT && for s in $(AGREE); do \
	  printf '== sluice bench %s --save FIRST; sluice bench %s --check --baseline FIRST\n\n' $$s $$s; \
	  $(BIN) bench $$s --save $$first/$$s.json && printf "\n" && (cd $$first && $(CURDIR)/$(BIN) bench $$s --check --baseline $$s.json); echo; \
	done | tee bench/results/agreement.txt

deps: ## install what the privileged tests use (Debian, root)
	@packaging/deps.sh test

deps-dev: ## install also what compiles the BPF programs and boots the test kernel
	@packaging/deps.sh dev

clean: ## remove build products
	rm -rf bin
