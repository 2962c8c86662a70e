#!/usr/bin/env bash
# Builds the CPU and the emulated CUDA kernels with address and undefined-behaviour sanitizers, and runs every
# operation, dtype and granularity on both, comparing bits.
#
#   tools/sanitize.sh path/to/python      an environment with jaxquant's test extra
set -euo pipefail
python=$(realpath -s "$1")
top=$(cd "$(dirname "$0")/.." && pwd)
build=$top/build/sanitize
running=()
site=$build/site
mkdir -p "$top/build"

"$python" -m pip install --quiet --progress-bar off nanobind cmake ninja
bin=$(dirname "$python")
"$bin/cmake" -S "$top" -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$python" \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1" -DJAXQUANT_CUDA=OFF -DJAXQUANT_EMULATION=ON -DJAXQUANT_ALL_ISAS=OFF \
  -DJAXQUANT_SANITIZE=address,undefined > "$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$bin/cmake" --build "$build" >> "$build.log" 2>&1 || { tail -n 60 "$build.log"; exit 1; }
rm -rf "$site" && mkdir -p "$site"
"$bin/cmake" --install "$build" --prefix "$site" >> "$build.log"
cp -rn "$top/jaxquant" "$site/"

# Leaks are Python's own; a handler's vptr checks need type information that JAX is built without.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:halt_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH=$site
cd "$build"
"$python" -c "import jaxquant; assert jaxquant.__file__.startswith('$site'), jaxquant.__file__"
"$python" "$top/tools/gpu.py" --stage launch --rehearse
"$python" "$top/tools/gpu.py" --stage bits --rehearse
# Every operation of both families, on both sets of kernels at once.
for kernels in ffi cuda_emulation; do
  "$python" -c "import jaxquant.testing; print(jaxquant.testing.conformance('$kernels'))" &
  running+=($!)
done
for process in "${running[@]}"; do wait "$process"; done
echo "no sanitizer report"
