#!/usr/bin/env bash
# Brings a checkout to where everything runs: system packages, a virtual environment with the
# pinned developer tools, and the native build. `make setup` calls it before every other target;
# with nothing changed since the last time it ends at once. VENV=DIR puts the environment elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
STAMP=$VENV/.setup-stamp
LOG=.cache/setup.log
MIN_PIP=25.1 # the first that reads dependency groups

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
  printf '\nsetup: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
  exit 1
}

# What the environment depends on: one line for the Python side, one for the native build.
fingerprint() {
  local native
  native=$(find CMakeLists.txt cmake ffi_transport/csrc -type f ! -name '.*' 2>/dev/null | LC_ALL=C sort) || true
  printf 'python %s\n' "$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)"
  printf 'native %s\n' "$({ echo "$PWD $native"; echo "$native" | tr '\n' '\0' | xargs -0 -r cat; } | sha256sum | cut -d' ' -f1)"
}

is_312() { "$@" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the path of a Python >= 3.12. By name first: pyenv's shims read .python-version.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_312 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= 3.12"
    real_path "$PYTHON"
    return
  fi
  for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    if command -v "$candidate" >/dev/null 2>&1 && is_312 "$candidate"; then
      real_path "$candidate"
      return
    fi
  done
  if command -v uv >/dev/null 2>&1 && candidate=$(uv python find '>=3.12' 2>/dev/null) &&
    is_312 "$candidate"; then
    real_path "$candidate"
    return
  fi
  fail "no Python >= 3.12 found (looked for python3.12, python3.13, python3, pyenv and uv)" \
    "Install one, for example by:  uv python install 3.12   or   pyenv install 3.12" \
    "or on Debian 13 and later:    apt-get install python3 python3-venv python3-dev" \
    "or name yours:                make setup PYTHON=/path/to/python3.12"
}

real_path() { "$1" -c 'import sys; print(sys.executable)'; }

# Prints the Debian packages that are missing, each found out by trying what it is for.
missing_packages() {
  local python=$1 cxx=${CXX:-c++} version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  echo 'static_assert(__cplusplus >= 202002L); int main() {}' |
    "$cxx" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1 || echo g++
  { [ -e /usr/include/rdma/fabric.h ] && [ -e /usr/include/rdma/fi_rma.h ]; } ||
    echo '#include <rdma/fi_rma.h>' | "$cxx" -fsyntax-only -x c++ - >/dev/null 2>&1 || echo libfabric-dev
  "$python" -c 'import ctypes; ctypes.CDLL("libfabric.so.1")' >/dev/null 2>&1 || echo libfabric1
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || echo "$version-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo "$version-dev"
}

install_packages() {
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
      as_root=(sudo -n)
    else
      fail "system packages are missing and this user may not install them. As root, run:" \
        "apt-get install $*"
    fi
  fi
  command -v apt-get >/dev/null 2>&1 ||
    fail "system packages are missing and there is no apt-get. Install what Debian calls:" "$*"
  say "installing system packages: $*"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o=Dpkg::Use-Pty=0)
  "${apt[@]}" install -y --no-install-recommends "$@" >>"$LOG" 2>&1 ||
    { "${apt[@]}" update >>"$LOG" 2>&1 &&
      "${apt[@]}" install -y --no-install-recommends "$@" >>"$LOG" 2>&1; } ||
    { tail -n 20 "$LOG" >&2; fail "apt-get install $* failed; the whole log is $LOG"; }
}

# Runs a pip command: with its own progress on a terminal, into the log otherwise.
pip() {
  local status=0
  if [ -t 2 ]; then
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >&2 || status=$?
  else
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >>"$LOG" 2>&1 || status=$?
    [ $status = 0 ] || tail -n 40 "$LOG" >&2
  fi
  [ $status = 0 ] || fail "pip $1 failed (see above$([ -t 2 ] || echo "; the whole log is $LOG"))"
}

main() {
  local now then=
  now=$(fingerprint)
  [ ! -e "$STAMP" ] || then=$(cat "$STAMP")
  if [ "$now" = "$then" ] && [ -x "$VENV/bin/python" ]; then
    return
  fi

  mkdir -p .cache
  exec 9>.cache/setup.lock
  flock 9 # two targets at once: the second finds the work done
  if [ -e "$STAMP" ] && [ "$now" = "$(cat "$STAMP")" ] && [ -x "$VENV/bin/python" ]; then
    return
  fi
  : >"$LOG"

  local python packages
  python=$(find_python)
  packages=$(missing_packages "$python")
  # shellcheck disable=SC2086
  if [ -n "$packages" ]; then
    install_packages $packages
    packages=$(missing_packages "$python")
    [ -z "$packages" ] ||
      fail "still missing after installing them: ${packages//$'\n'/ }" \
        "tried with CXX=${CXX:-c++} and $python"
  fi

  # an environment whose Python is gone or too old is made anew
  if [ -d "$VENV" ] && ! { is_312 "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
    [ -e "$VENV/pyvenv.cfg" ] ||
      fail "$VENV exists and is no virtual environment; remove it or choose another: VENV=DIR"
    say "$VENV does not work any more: making it anew"
    rm -rf "$VENV"
    then=
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    say "making the virtual environment $VENV with $python"
    "$python" -m venv "$VENV"
  fi
  rm -f "$STAMP"

  if [ -z "$then" ] || [ "${now%%$'\n'*}" != "${then%%$'\n'*}" ]; then
    "$VENV/bin/python" -c "import sys, pip
sys.exit(tuple(map(int, pip.__version__.split('.')[:2])) < tuple(map(int, '$MIN_PIP'.split('.'))))" ||
      pip install --upgrade "pip>=$MIN_PIP"
    say "building the native part and installing packages (some minutes, about 800 MB, the first time)"
    pip install -e . --group dev
  else
    say "building the native part (C++ sources changed)"
    pip install --no-deps -e .
  fi
  printf '%s\n' "$now" >"$STAMP"
  say "ready: $VENV"
}

main
