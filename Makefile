# Every check and every task has its one definition here. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CARGO ?= $(or $(shell command -v cargo 2>/dev/null),$(wildcard $(HOME)/.cargo/bin/cargo))
MODEL ?= smollm2-135m
ARGS ?=

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find scheduler-rs -name '*.rs' -o -name Cargo.toml)
TOOLS := $(VENV)/.tools
BUILT := $(VENV)/.built

export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(CURDIR)/$(BIN):$(if $(CARGO),$(dir $(CARGO)):)$(PATH)
unexport PYTHONHOME

.PHONY: help setup demo serve test test-rust test-python test-matrix lint bench size clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(BUILT)  ## Create .venv, build the Rust extension, install everything (quick when up to date)

demo: $(BUILT)  ## Fetch the default model, answer three prompts, show drafting
	@$(BIN)/python -m sonar_engine.demo $(ARGS)

serve: $(BUILT)  ## Serve MODEL (default smollm2-135m) on 127.0.0.1:8000; more options in ARGS
	@exec $(BIN)/sonar serve $(MODEL) $(ARGS)

test: test-rust test-python  ## Rust and Python tests

test-rust: $(BUILT)
	cargo test --workspace --quiet

test-python: $(BUILT)
	$(BIN)/python -m pytest $(ARGS)

test-matrix: $(BUILT)  ## Every drafter in every situation against speculation off, on the real model (under an hour)
	$(BIN)/python -m pytest tests/matrix tests/differential --matrix=full $(ARGS)

lint: $(BUILT)  ## Formatting, lints, types and the extension's stub; warnings are errors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest sonar_engine._scheduler
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings

bench: $(BUILT)  ## Scheduler cost, latency and throughput beside transformers
	$(BIN)/sonar bench scheduler $(ARGS)
	$(BIN)/sonar bench latency --model $(MODEL) --compare transformers $(ARGS)
	$(BIN)/sonar bench throughput --model $(MODEL) $(ARGS)

size: $(BUILT)  ## Lines a room, longest functions and files
	@$(BIN)/python bench/size_report.py

clean:  ## Remove the virtual environment and the Rust build
	rm -rf $(VENV) target

$(TOOLS): pyproject.toml $(wildcard kernels/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; install one, or run: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -n "$(CARGO)" || { echo "error: no cargo found; install Rust (https://rustup.rs) and try again" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "error: no C compiler (cc) found; Rust links with it; install gcc or clang" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: '$(PYTHON) -m venv' failed; install the venv module (python3-venv on Debian)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet 'maturin>=1.9,<2'
	@touch $@

# `maturin develop` installs the dependencies with the extension, so that sonar-kernels must be there before it.
$(BUILT): $(TOOLS) $(RUST_SOURCES)
	@echo "Installing dependencies and building the Rust extension; the first time this takes minutes (torch is large)"
	$(BIN)/python -m pip install --quiet --editable ./kernels
	PIP_QUIET=1 $(BIN)/maturin develop --release --extras dev --quiet
	@touch $@
