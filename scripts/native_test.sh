#!/usr/bin/env bash
# Builds the native unit tests with sanitizers and runs them.
#   scripts/native_test.sh [address,undefined | thread] [part of a test's name]
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=${1:-address,undefined}
bin=$PWD/${VENV:-.venv}/bin
cmake=cmake
[ -x "$bin/cmake" ] && cmake=$bin/cmake
generator=()
if [ -x "$bin/ninja" ]; then
  generator=(-G Ninja "-DCMAKE_MAKE_PROGRAM=$bin/ninja")
fi
build=build/native-${sanitizers//,/-}
"$cmake" -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Debug \
  "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1" \
  -DFFI_TRANSPORT_PYTHON=OFF -DFFI_TRANSPORT_NATIVE_TESTS=ON \
  "-DFFI_TRANSPORT_SANITIZE=$sanitizers" >/dev/null
nice "$cmake" --build "$build" --parallel "$(nproc)" | { grep -v '^\[' || true; }
"$build/tests/native/native_tests" "${@:2}"
