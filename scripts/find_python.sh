#!/usr/bin/env bash
# Print the path of a Python that the project can be set up with, or stop with one sentence.
#
# Every candidate is run, because a name on PATH may be a shim that does not work. megatron-core has
# wheels for 3.12 and 3.13, so these come first; with a newer one pip compiles it. Set PYTHON to choose.
set -euo pipefail

# Prints "<major.minor> <path>", or "no" and the reason.
probe() {
    local answer
    answer=$(timeout 30 "$1" -I - 2>/dev/null <<'PY'
import sys

version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 12):
    print("no (Python " + version + ")")
    sys.exit()
try:
    import ctypes, ensurepip, ssl, sysconfig, venv
except ImportError as error:
    print("no (Python " + version + " without " + str(error.name) + ")")
    sys.exit()
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("no (free-threaded build of Python " + version + ")")
else:
    print(version, sys.executable)
PY
    ) || answer=""
    echo "${answer:-no (does not run)}"
}

candidates() {
    local home=${HOME:-~} # without HOME bash asks the password file
    local pyenv=${PYENV_ROOT:-$home/.pyenv}/versions
    local uv=${UV_PYTHON_INSTALL_DIR:-$home/.local/share/uv/python}
    local version
    for version in 3.12 3.13; do
        echo "python$version"
        compgen -G "$pyenv/$version*/bin/python" || true
        compgen -G "$uv/cpython-$version*/bin/python$version" || true
    done
    echo python3
    echo python
    for version in 3.14 3.15; do
        echo "python$version"
        compgen -G "$pyenv/$version*/bin/python" || true
    done
}

if [ -n "${PYTHON:-}" ]; then
    answer=$(probe "$PYTHON")
    if [[ $answer == no* ]]; then
        echo "megatron_elas: PYTHON=$PYTHON cannot be used ${answer#no }: name a Python 3.12 or newer that has venv." >&2
        exit 6
    fi
    echo "${answer#* }"
    exit
fi

newer=""
tried=""
while read -r candidate; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    answer=$(probe "$candidate")
    case $answer in
        "3.12 "* | "3.13 "*)
            echo "${answer#* }"
            exit
            ;;
        no*) tried="$tried, $candidate ${answer#no }" ;;
        *) newer=${newer:-${answer#* }} ;;
    esac
done < <(candidates)

if [ -n "$newer" ]; then
    echo "megatron_elas: only $newer was found; megatron-core has no wheel for it, so pip will compile it (needs g++)." >&2
    echo "$newer"
    exit
fi
echo "megatron_elas: no Python 3.12 or newer with venv was found (tried: ${tried:-none on PATH}): get one with" \
    "'apt-get install python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12'," \
    "or name one, as in 'make PYTHON=/path/to/python3.12 test'." | sed 's/(tried: , /(tried: /' >&2
exit 6
