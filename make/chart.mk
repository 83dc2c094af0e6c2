# The Helm chart, deploy/helm/dspark-serve. The Makefile includes this and defines BIN and setup-test.
.PHONY: chart

chart: setup ## Bring the chart's copies of rules, dashboards and profiles up to date, and its table of values
	@$(BIN)/python deploy/helm/chart.py
