# The ledger against vLLM's released wheels. Included by the Makefile.
# DSPARK_RELEASES_CACHE names the cache (default: .cache/releases); only the wheels' Python files are kept there.
PYTHON ?= python

.PHONY: releases lock test-releases

releases: ## fetch and unpack the Python files of every vLLM release of the ledger (cached)
	$(PYTHON) -m patches.releases

lock: ## put a release's fingerprints into patches/upstream.lock: make lock VLLM=x.y.z (all without VLLM)
	$(PYTHON) -m patches.lockfile $(VLLM)

test-releases: releases ## hold every patch against every release
	$(PYTHON) -m pytest -q -m releases tests/patches/releases
