#!/usr/bin/env bash
# One prepared run on a machine with a GPU and without a network, of at most 8 minutes.
#
#   scripts/gpu_check.sh --prepare DIR              where registries are: what that machine may lack
#   scripts/gpu_check.sh --carried DIR --out OUT    there: build, check, measure
#
# The machine needs Python 3.12 with a jax for its GPU, a C++ compiler and CMake. DIR holds wheels,
# libfabric as Debian packages, Python's headers and a native part built where it was prepared,
# which serves if the build fails there; --no-build takes it at once. Nothing is installed: all that
# is missing is unpacked into a folder that is removed in the end. Other options go to gpu_check.py,
# such as --cpu and --only. OUT gets gpu_check.json, gpu_check.md and gpu_check.log.
set -euo pipefail
caller=$PWD
PATH=$PATH:/usr/sbin:/sbin # ldconfig's
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TOTAL_SECONDS=480
BUILD_SECONDS=120
MARGIN_SECONDS=15
MAX_CARRIED_MIB=64
# What the application imports and an image for training may lack.
WHEELS=(msgspec fastapi starlette opentelemetry-api pydantic pydantic-core annotated-types
  annotated-doc typing-inspection uvicorn click h11 httpx httpcore anyio idna certifi tokenizers
  safetensors typer shellingham jinja2 markupsafe prometheus-client nanobind)
DEBS=(libfabric1 libfabric-dev ibverbs-providers libibverbs1 librdmacm1 libnl-3-200
  libnl-route-3-200 libpsm-infinipath1 libpsm2-2 libnuma1 libatomic1 libuuid1)

# What the caller named, who stands elsewhere.
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$caller/$1" ;; esac; }
case ${PYTHON:-} in */*) PYTHON=$(absolute "$PYTHON") ;; esac

say() { printf 'gpu_check: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 2
}

prepare() {
  local folder=$1 python=${PYTHON:-${VENV:-.venv}/bin/python} name version minor platforms=() mib
  mkdir -p "$folder"/{wheels,debs,native} 2>/dev/null ||
    fail "--prepare: no folder $folder can be made"
  folder=$(cd "$folder" && pwd)
  for minor in 17 24 27 28 31 34 35; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
  done
  for name in "${WHEELS[@]}"; do
    # What only the build needs (nanobind) need not be installed here: its newest, then.
    version=$("$python" -c "from importlib.metadata import version; print('==' + version('$name'))" \
      2>/dev/null) || version=
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
      --python-version 3.12 --implementation cp "${platforms[@]}" \
      --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder/wheels" \
      "$name$version" || fail "--prepare: the wheel $name$version cannot be had (see above)"
  done
  (cd "$folder/debs" && apt-get -qq download "${DEBS[@]}") ||
    fail "--prepare: Debian packages cannot be had (see above); perhaps after apt-get update"
  cp ffi_transport/_native*.so "$folder/native" 2>/dev/null ||
    "$python" -c "import shutil, ffi_transport._native as n; shutil.copy(n.__file__, '$folder/native')"
  "$python" -c "import shutil, sysconfig
shutil.copytree(sysconfig.get_path('include'), '$folder/python-include', dirs_exist_ok=True)"
  mib=$(du -sm "$folder" | cut -f1)
  [ "$mib" -le "$MAX_CARRIED_MIB" ] || fail "$folder has $mib MiB, more than $MAX_CARRIED_MIB"
  say "$folder has $mib MiB; next, on the GPU machine: scripts/gpu_check.sh --carried DIR --out OUT"
}

# Unpacks the wheels that this Python lacks, and no others: two versions of one package disturb.
unpack_wheels() {
  local missing
  missing=$("$python" - "$1"/wheels/*.whl <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
for file in sys.argv[1:]:
    if Path(file).is_file():
        try:
            version(Path(file).name.split("-")[0])
        except PackageNotFoundError:
            print(file)
PY
  )
  mkdir -p "$work/site"
  while IFS= read -r file; do
    [ -z "$file" ] || "$python" -m zipfile -e "$file" "$work/site"
  done <<<"$missing"
  missing=$(PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} "$python" - "${WHEELS[@]}" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
PY
  )
  [ -z "$missing" ] || say "neither here nor carried:" $missing
}

# Unpacks libfabric and what it needs, unless the machine has one; libraries of its own come first.
unpack_debs() {
  local deb library libraries=$work/debs/usr/lib/x86_64-linux-gnu
  "$python" -c 'import ctypes; ctypes.CDLL("libfabric.so.1")' 2>/dev/null &&
    [ -e /usr/include/rdma/fi_rma.h ] && return
  for deb in "$1"/debs/*.deb; do
    [ ! -e "$deb" ] || dpkg-deb -x "$deb" "$work/debs"
  done
  [ -d "$libraries" ] || return 0
  # Those elsewhere, which alternatives or a second folder would lead to; then links by soname.
  find "$work/debs" -name '*.so.*' -type f ! -path "$libraries/*" -exec cp -t "$libraries" {} +
  ldconfig -n "$libraries"
  for library in "$libraries"/*.so.*; do
    if ldconfig -p | grep -q "[[:space:]]$(basename "$library") "; then rm "$library"; fi
  done
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  "$python" -c 'import ctypes; ctypes.CDLL("libfabric.so.1")' ||
    say "libfabric as carried cannot be loaded: nothing will be transferred"
}

# Names the machine's CUDA to jax, which without NVIDIA's wheels of it looks for an assembler on
# PATH and in /usr/local/cuda alone.
find_cuda() {
  local folder
  [ -z "${CUDA_ROOT:-}" ] && ! "$python" -c 'import importlib.util as u, pathlib, sys
there = u.find_spec("nvidia")
folders = there.submodule_search_locations if there else []
sys.exit(not any(list(pathlib.Path(f).glob("*/bin/ptxas")) for f in folders))' || return 0
  for folder in "${CUDA_HOME:-}" /usr/local/cuda \
    "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")"; do
    if [ -x "$folder/bin/ptxas" ] && [ -d "$folder/nvvm/libdevice" ]; then
      export CUDA_ROOT=$folder
      return
    fi
  done
}

# Puts the native part into the tree: built here, else as it was carried. Says which in $native.
native_part() {
  local carried=$1 options=() cmake=(cmake) deadline=$((SECONDS + BUILD_SECONDS))
  command -v cmake >/dev/null || cmake=("$python" -m cmake)
  [ ! -d "$work/debs/usr/include/rdma" ] ||
    options+=("-DLIBFABRIC_INCLUDE_DIR=$work/debs/usr/include")
  if ! "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
    options+=("-DPython_INCLUDE_DIR=$carried/python-include")
  fi
  ! command -v ninja >/dev/null || options+=(-G Ninja)
  if [ "$build" = yes ] &&
    timeout -k 5 "$BUILD_SECONDS" "${cmake[@]}" -S . -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
      "-DPython_EXECUTABLE=$python" "${options[@]}" >"$out/gpu_check-build.log" 2>&1 &&
    [ "$SECONDS" -lt "$deadline" ] &&
    timeout -k 5 $((deadline - SECONDS)) "${cmake[@]}" --build "$work/build" -j "$(nproc)" \
      --target _native >>"$out/gpu_check-build.log" 2>&1; then
    cp "$work"/build/_native*.so "$work/tree/ffi_transport"
    native="native part built here in $SECONDS s"
    return
  fi
  if [ "$build" = yes ]; then
    tail -n 5 "$out/gpu_check-build.log" >&2
    [ "$SECONDS" -lt "$deadline" ] || say "the build was given up after $BUILD_SECONDS s"
  fi
  cp "$carried"/native/_native*.so "$work/tree/ffi_transport" ||
    fail "the native part was not built, and none was carried"
  native="native part as carried"
}

check() {
  local carried=$1 tree version
  shift
  python=$(command -v "${PYTHON:-python3}") || fail "no ${PYTHON:-python3}"
  [ -d "$carried" ] || fail "--carried: no folder $carried"
  carried=$(cd "$carried" && pwd)
  mkdir -p "$out" 2>/dev/null || fail "--out: no folder $out can be made"
  out=$(cd "$out" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  tree=$work/tree
  mkdir -p "$tree"
  tar -c --exclude=__pycache__ --exclude='_native*.so' --exclude=csrc \
    jaxdisagg pallas_kernels ffi_transport models scripts pyproject.toml | tar -x -C "$tree"
  # As an installed distribution is: its version goes beside the figures.
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -n 1)
  mkdir -p "$tree/jaxdisagg-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: jaxdisagg\nVersion: %s\n' "$version" \
    >"$tree/jaxdisagg-$version.dist-info/METADATA"
  unpack_debs "$carried"
  unpack_wheels "$carried"
  find_cuda
  export PYTHONPATH=$tree:$work/site${PYTHONPATH:+:$PYTHONPATH}
  native_part "$carried"
  say "$native"
  cd "$work"
  local status=0 pid
  "$python" "$tree/scripts/gpu_check.py" --out "$out" --note "$native" \
    --seconds $((TOTAL_SECONDS - MARGIN_SECONDS - SECONDS)) "$@" &
  pid=$!
  # bash would keep a signal until the program has ended.
  trap 'kill -TERM "$pid" 2>/dev/null' INT TERM HUP
  wait "$pid" || status=$?
  while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" || status=$?
  done
  return "$status"
}

carried='' out='' build=yes rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --prepare | --carried | --out) case ${2:-} in '' | --*) fail "$1 needs a folder" ;; esac ;;
  esac
  case $1 in
    --prepare)
      prepare "$(absolute "$2")"
      exit
      ;;
    --carried) carried=$(absolute "$2"); shift ;;
    --out) out=$(absolute "$2"); shift ;;
    --no-build) build=no ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/gpu_check.sh
      exit
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[ -n "$carried" ] && [ -n "$out" ] || fail "expected --prepare DIR, or --carried DIR --out OUT"
check "$carried" "${rest[@]}"
