#!/usr/bin/env bash
# Makes .venv with pinned requirements and this package, once: a second run with the same files does nothing.
#
#     launch/setup.sh [requirements.txt | requirements-dev.txt]
#
# PYTHON=/path/to/python3.11 chooses the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements="${1:-requirements.txt}"
venv=.venv
has_headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
    done
    fail "no Python 3.11 or 3.12 found (looked for python3.11, python3.12, python3).
Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3.11 make ..."
}

# All that an installation depends on; the path too, because a moved .venv is broken.
fingerprint() {
    { cat requirements.txt requirements-dev.txt pyproject.toml; pwd; "$venv/bin/python" -V; } | cksum | tr ' ' '-'
}

# Sets `clear` for an environment that does not work any more: only what this script has made is removed, and not with an
# engine in it (`make setup-vllm`). A directory that is no environment keeps what it has.
clear_ours() {
    clear=()
    [ -e "$venv/pyvenv.cfg" ] || return 0
    compgen -G "$venv/.installed-*" >/dev/null && ! compgen -G "$venv/*/pyvenv.cfg" >/dev/null ||
        fail "$PWD/$venv has no working pip, and was not made by this script or has other environments in it:
move or remove it, and run this again"
    clear=(--clear)
}

# requirements-dev.txt includes requirements.txt, so its stamp stands for both.
is_done() {
    local name
    [ -x "$venv/bin/python" ] || return 1
    for name in "$requirements" requirements-dev.txt; do
        [ "$(cat "$venv/.installed-$name" 2>/dev/null)" = "$(fingerprint)" ] && return
    done
    return 1
}

make_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python clear
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: ensurepip or venv is missing.
Debian, Ubuntu: apt-get install python3-venv (or the python3.x-venv of that Python)"
    "$python" -c "$has_headers" ||
        fail "the headers of $python are missing; pycosat, which reasoning-gym needs, is compiled while installing.
Debian, Ubuntu: apt-get install python3-dev (or the python3.x-dev of that Python)"
    clear_ours
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || fail "'$python -m venv $venv' failed"
}

is_done && exit 0
command -v cc >/dev/null || command -v gcc >/dev/null ||
    fail "no C compiler found. Debian, Ubuntu: apt-get install gcc libc6-dev"
make_venv
printf 'setup: installing %s into %s (the first time takes some minutes)\n' "$requirements" "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input -r "$requirements"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
fingerprint >"$venv/.installed-$requirements"
printf 'setup: done\n'
