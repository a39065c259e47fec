# Targets for contributors. CONTRIBUTING.md describes them.
.DEFAULT_GOAL := help
.PHONY: help demo demo-down test test-rust test-go test-cluster test-versions soak fuzz histories quotas check image crds render sbom release docs msrv bench bench-placement bench-scale test-karpenter test-toolkit test-monitoring

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: ## start a local Kubernetes with simulated GPUs, Cleave, and pods that share GPUs
	@e2e/demo

demo-down: ## remove the cluster of `make demo`
	@e2e/cluster/cluster down

test: ## run all tests; CI also runs make check, make msrv and make docs
	@e2e/test all

check: ## check formatting, lints and generated files
	@e2e/test check

test-rust: ## run the Rust tests that need no cluster
	@e2e/test rust

test-go: ## run the tests of the cluster launcher
	@e2e/test go

test-cluster: ## run the tests on the local cluster; TEST=NAME runs those with NAME in their name
	@e2e/test cluster

test-versions: ## run chosen cluster tests on Kubernetes 1.34 to 1.37: VERSIONS="1.34.4 1.37.2"
	@VERSIONS="$(VERSIONS)" e2e/test versions

soak: ## run pod churn and component failures on two nodes: MINUTES=30 SEED=1
	@e2e/test soak

fuzz: ## fuzz every parser of input from outside Cleave: SECONDS=60 SEED=1 TARGET=checkpoint
	@FUZZ_SECONDS="$(SECONDS)" FUZZ_SEED="$(SEED)" e2e/test fuzz

histories: ## run 10,000 random histories against a model of kube-scheduler: CASES=10000
	@CASES="$(CASES)" e2e/test histories

quotas: ## check each property of quotas on 100,000 random clusters: CASES=100000
	@CASES="$(CASES)" e2e/test quotas

crds: ## write crds/ from the types
	@e2e/test crds

render: ## write deploy/manifests.yaml from the chart
	@deploy/render

sbom: ## write the SBOM of the image's programs to target/sbom
	@deploy/sbom

release: ## build a release in target/release-VERSION: VERSION=1.2.3
	@deploy/release/run "$(VERSION)"

docs: ## build the documentation site in target/docs, and check its links
	@docs/build

msrv: ## compile everything with the oldest supported Rust
	@e2e/test msrv

bench: ## run the benchmarks that need no GPU
	@e2e/test bench

bench-placement: ## compare pods per second with an extended resource and DRA on 200 and 1,000 nodes
	@e2e/placement/bench

bench-scale: ## measure the operator with 1,000 nodes and 80,000 running pods
	@e2e/placement/bench scale

test-karpenter: ## test a pool of simulated nodes that Karpenter grows and shrinks
	@e2e/karpenter/test

test-toolkit: ## test the chart's defaults with NVIDIA's container toolkit: LAYOUT=default
	@LAYOUT="$(LAYOUT)" e2e/toolkit/test

test-monitoring: ## test alert rules and the dashboard with Prometheus: PART=rules needs no cluster
	@e2e/monitoring/test $(PART)
