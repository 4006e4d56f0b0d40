#!/bin/sh
# make_picture_base.sh FOLDER [key=value ...]: pretrain the base of the quickstart of pictures and write it to FOLDER, which
# must not exist: ten minutes on two CPU cores. Key=value pairs override pretrain_pictures.yaml.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$1
shift
work=runs/quickstart-picture-base
rm -rf "$work"
"$python" scripts/quickstart/make_pictures.py --base "$work"
"$python" -m jaxtune.train scripts/quickstart/pretrain_pictures.yaml "$@"
# The run leaves fp32 weights and its own template; the package holds bf16, and the tokenizer's.
"$python" -c '
import sys, jaxtune, transformers
model, _ = jaxtune.from_pretrained(sys.argv[1], dtype="bfloat16", pictures=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
jaxtune.save_pretrained(model, sys.argv[3], tokenizer=tokenizer)' "$work/run/merged" "$work/tokenizer" "$folder"
