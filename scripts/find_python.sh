#!/bin/sh
# Print the path of a Python >= 3.12 that can make environments, or say in one line that there is none.
# Order: $PYTHON (an explicit choice never falls back), PATH, ~/.pyenv/versions, uv's folder. Nothing is downloaded.

usable() {  # prints the real interpreter behind a name: a shim on PATH may exist and still not run
    "$1" -c '
import sys
if sys.version_info < (3, 12): sys.exit(1)
import ensurepip, venv  # Debian ships a Python without them
print(sys.executable)' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    echo "jaxtune: PYTHON=$PYTHON is not a Python 3.12 or newer with venv and ensurepip" >&2
    exit 1
fi

for name in python3.12 python3.13 python3.14 python3; do
    usable "$name" && exit 0
done

# Unmatched patterns stay as they are and are simply not usable. Versions known to work come before newer ones.
pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
uv_versions="${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"
for minor in 12 13 14; do
    for path in "$pyenv_versions/3.$minor".*/bin/python "$uv_versions"/cpython-3."$minor".*/bin/python3; do
        usable "$path" && exit 0
    done
done
for path in "$pyenv_versions"/*/bin/python "$uv_versions"/*/bin/python3; do
    usable "$path" && exit 0
done

echo "jaxtune: no Python 3.12 or newer found on PATH, in $pyenv_versions or in $uv_versions; install one or set PYTHON=/path/to/python3" >&2
exit 1
