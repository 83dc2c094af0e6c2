# What deploy/ holds that is built from code. The Makefile includes this and defines BIN and setup-test.

.PHONY: dashboards

dashboards: setup-test ## Build deploy/grafana/dashboards from deploy/grafana/*.py
	@$(BIN)/python deploy/grafana/build.py
