# GPU tests: on a host with one Hopper GPU and this package installed beside vLLM. Elsewhere they are skipped, each
# with its reason. 0.28.0's builder and sampler are tested where `make test-releases` has fetched that release.
.PHONY: test-gpu bench-gpu bench-never-slower bench-telemetry bench-two-ranks
MINUTES ?= 30

test-gpu: ## Tests that need a Hopper GPU
	$(PYTHON) -m pytest -ra tests/gpu

bench-gpu: ## What flattened metadata costs on this GPU
	$(PYTHON) -m tests.bench.flattened_metadata

bench-never-slower: ## Compare adaptive with fixed verification on this GPU, in interleaved rounds (half an hour)
	$(PYTHON) -m tests.bench.never_slower --only overhead,micro,workloads,startup --rounds 8 --part-seconds 600

bench-telemetry: ## What telemetry adds to a step of an engine on this GPU
	$(PYTHON) -m tests.bench.telemetry_engine

bench-two-ranks: ## tp-consensus on two GPUs: drift, requests that drain together, and its cost (MINUTES=30)
	$(PYTHON) -m tests.bench.two_ranks --minutes $(MINUTES)
