# The ledger against vLLM's released wheels. The Makefile includes this and defines BIN and setup-test.
# Only the wheels' Python files are kept, in .cache/releases or where DSPARK_RELEASES_CACHE says.

.PHONY: releases lock test-releases

releases: setup-test ## Fetch the Python files of every vLLM release of the ledger (cached)
	@$(BIN)/python -m patches.releases

lock: setup-test ## Put a release's fingerprints into patches/upstream.lock: make lock VLLM=x.y.z (all without VLLM)
	@$(BIN)/python -m patches.lockfile $(VLLM)

test-releases: releases ## Hold every patch against every vLLM release
	@$(BIN)/python -m pytest -n auto -m "releases and not slow" tests/patches/releases
