# What takes long and shows that the server keeps working: each breaks, floods or loads a server of its own.
.PHONY: faults fuzz drain soak

faults: setup-test ## Break every process of an engine, each in a server of its own
	@$(BIN)/python -m pytest -m "robustness or not robustness" -o timeout=1800 tests/e2e/test_faults.py

fuzz: setup-test ## 10,000 requests as nobody should send them
	@$(BIN)/python -m pytest -s -m robustness -o timeout=7200 tests/e2e/test_fuzz.py

drain: setup-test ## Hundreds of requests that end together, many rounds, on two tensor-parallel ranks
	@$(BIN)/python -m pytest -s -m robustness -o timeout=7200 tests/e2e/test_drain_together.py

soak: setup-test ## Load a server for long and measure what grows (SOAK_MINUTES=80, 50 of them warm-up; RAW=file of samples)
	@$(BIN)/python -m tests.bench.soak $(if $(SOAK_MINUTES),--minutes $(SOAK_MINUTES)) $(if $(RAW),--raw $(RAW))
