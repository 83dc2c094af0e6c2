# The Helm chart, deploy/helm/dspark-serve. The Makefile includes this and defines BIN and setup-test.
.PHONY: chart test-sweep

chart: setup ## Bring the chart's copies of rules, dashboards and profiles up to date, and its table of values
	@$(BIN)/python deploy/helm/chart.py

test-sweep: setup-test ## Every pair of the chart's switches, and one model over two nodes (minutes)
	@$(BIN)/python -m pytest -m sweep tests/deploy/helm tests/e2e
