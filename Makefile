# make demo and make test are all you need; both make .venv first, and a second run is quick.
#   make demo PYTHON=python3.12                                          another interpreter
#   make demo TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu       the small CPU build of torch
#   make demo PORT=8123                                                  serve there
VENV ?= .venv
export VENV PYTHON TORCH_INDEX_URL
# Not from the environment: there PORT is other programs'.
port := $(if $(filter command line,$(origin PORT)),--port $(PORT))

.PHONY: help demo test check format proto clean

help: ## say what there is
	@sed -n 's/^\([a-z]*\):.*## /make \1: /p' Makefile

demo: $(VENV)/.run ## bring a cluster up on this machine, ask it a question, show where the time went
	@$(VENV)/bin/twostroke demo $(port) $(ARGS)

test: $(VENV)/.dev ## lint, types, layers and all tests
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check $(ARGS)

check: $(VENV)/.dev ## lint, types and layers only
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check --no-tests $(ARGS)

format: $(VENV)/.dev ## let ruff format and fix what it can
	@$(VENV)/bin/ruff check --fix --quiet . ; $(VENV)/bin/ruff format .

proto: ## regenerate the gRPC stubs
	@VENV=.venv-protocol scripts/generate_protocol

clean: ## remove the environments and caches (nothing that is in git)
	rm -rf $(VENV) .venv-protocol .mypy_cache .ruff_cache .pytest_cache .hypothesis build
	rm -rf .import_linter_cache *.egg-info

# The stamps depend on what decides the contents of the environment, so a second run installs nothing.
$(VENV)/.run: pyproject.toml scripts/setup
	@scripts/setup run && touch $@

$(VENV)/.dev: pyproject.toml scripts/setup
	@scripts/setup dev && touch $(VENV)/.run $@
