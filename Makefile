# Everything a person needs is one of these; CONTRIBUTING.md says what each is made of.
.DEFAULT_GOAL := help
.PHONY: help demo demo-down test test-rust test-go test-cluster soak fuzz check image crds render sbom release docs msrv bench bench-placement

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: ## a local Kubernetes with simulated GPUs, Cleave installed, pods sharing GPUs; leaves the cluster up
	@e2e/demo

demo-down: ## removes what `make demo` left running
	@e2e/cluster/cluster down

test: ## make check and all tests, the local cluster included; CI also runs make msrv and make docs
	@e2e/test all

check: ## formatting, lints, generated files
	@e2e/test check

test-rust: ## the Rust tests that need no cluster
	@e2e/test rust

test-go: ## the launcher's own tests
	@e2e/test go

test-cluster: ## the tests on the local cluster; TEST=name runs those whose name contains it
	@e2e/test cluster

soak: ## churn and chaos on two nodes of four GPUs: MINUTES=30 SEED=1
	@e2e/test soak

fuzz: ## hostile input for everything that is read of others: SECONDS=60 SEED=1 TARGET=checkpoint
	@FUZZ_SECONDS="$(SECONDS)" FUZZ_SEED="$(SEED)" e2e/test fuzz

crds: ## writes crds/ from the types
	@e2e/test crds

render: ## writes deploy/ from the chart
	@deploy/render

sbom: ## the SBOM of the image's programs, in target/sbom
	@deploy/sbom

release: ## image, chart, command line, SBOM and checksums in target/release-VERSION: VERSION=1.2.3
	@deploy/release/run "$(VERSION)"

docs: ## the documentation site in target/docs, its generated pages, and a check of its links
	@docs/build

msrv: ## compiles everything with the oldest supported Rust
	@e2e/test msrv

bench: ## the benchmarks that need no GPU
	@e2e/test bench

bench-placement: ## pods per second beside an extended resource and DRA, on 200 and 1,000 simulated nodes
	@e2e/placement/bench
