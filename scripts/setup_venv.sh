#!/usr/bin/env bash
# Create or refresh the virtual environment that make uses. Safe to repeat; an interrupted run is resumed.
#
#   VENV      folder of the environment       (default .venv)
#   PYTHON    interpreter to create it with   (default: chosen by find_python.sh)
#   EDITABLE  "no": only the dependencies     (default yes; .ci/run shares one environment among checkouts)
#
# Files in the environment: .elas-owned (this script made it, so it may make it anew), .elas-installed
# (hash of the requirements that are in), .elas-project (checkout that is installed), install.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME # pip would take this checkout for an installed package

venv=${VENV:-.venv}
venv=${venv%/}
editable=${EDITABLE:-yes}
python=$venv/bin/python
log=$venv/install.log
pins=requirements/tested.txt

say() { echo "megatron_elas: $*" >&2; }
die() {
    say "$*"
    exit 1
}
hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

wanted_packages=$(hash_of "$pins")
wanted_project="$PWD $(hash_of setup.py pyproject.toml)"

packages_ready() { [ "$(cat "$venv/.elas-installed" 2>/dev/null)" = "$wanted_packages" ] && "$python" -c '' 2>/dev/null; }
project_ready() { [ "$editable" = no ] || [ "$(cat "$venv/.elas-project" 2>/dev/null)" = "$wanted_project" ]; }

install() {
    PIP_USER=no PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-input "$@" >>"$log" 2>&1
}

is_foreign() { [ ! -e "$venv/.elas-owned" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; }

refuse_unusable() {
    if is_foreign; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) or sys.prefix == sys.base_prefix)' 2>/dev/null ||
            die "VENV=$venv is no virtual environment with Python 3.12 or newer: name another folder, or remove it."
        "$python" -m pip --version >/dev/null 2>&1 ||
            die "VENV=$venv has no pip: run '$python -m ensurepip', or name another folder."
    fi
}

create_venv() {
    refuse_unusable
    if is_foreign || "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local base
    base=$(scripts/find_python.sh)
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.elas-owned"
    "$base" -m venv "$venv" >"$log" 2>&1 || { cat "$log" >&2; die "'$base -m venv $venv' failed, see above."; }
}

fail_install() {
    grep -v '^WARNING' "$log" | tail -n 20 >&2
    die "installing into $venv failed, see above and $log; run the same command again to go on from here."
}

install_packages() {
    say "installing torch, Megatron and the tools into $venv: about 5 GB and a few minutes, the first time only."
    rm -f "$venv/.elas-installed"
    : >"$log"
    if ! install -r "$pins"; then
        grep -qE 'No matching distribution|ResolutionImpossible|conflicting dependencies' "$log" || fail_install
        say "warning: the versions of $pins cannot be had here (see $log); taking the ranges of pyproject.toml."
        "$python" >"$venv/ranges.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["dev"]))
PY
        install -r "$venv/ranges.txt" || fail_install
    fi
    # A package that an interrupted run unpacked by half looks installed to pip.
    if ! "$python" -c 'import megatron.core, msgspec, numpy, psutil, sentencepiece, torch, websockets' >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        die "the packages in $venv do not import, see above and $log: remove $venv and run the same command again."
    fi
    echo "$wanted_packages" >"$venv/.elas-installed"
}

install_project() {
    rm -f "$venv/.elas-project"
    install --no-deps --no-build-isolation --editable . || fail_install
    echo "$wanted_project" >"$venv/.elas-project"
}

packages_ready && project_ready && exit 0

# Before the lock is made, which would be left behind. Where there is one, another may be setting up: ask later.
[ -e "$venv.lock" ] || refuse_unusable
{ mkdir -p "$(dirname "$venv")" && touch "$venv.lock"; } 2>/dev/null ||
    die "VENV=$venv cannot be created: name a folder in one that you may write to."
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock --nonblock 9 || { say "waiting for another set-up of $venv." && flock 9; }
fi
if ! packages_ready; then
    create_venv
    install_packages
fi
if ! project_ready; then
    install_project
fi
