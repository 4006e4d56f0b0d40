#!/bin/sh
# make_base.sh FOLDER [key=value ...]: pretrain the quickstart's base model and write it to FOLDER, which must not exist.
# Text and tokenizer are made anew; about two minutes with an H200, half of it on the host. Key=value pairs override pretrain.yaml.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$1
shift
work=runs/quickstart-base
rm -rf "$work"
mkdir -p "$work"
"$python" scripts/quickstart/make_pretraining_text.py "$work/text.jsonl"
"$python" scripts/quickstart/make_tokenizer.py "$work/text.jsonl" "$work/tokenizer"
"$python" -m jaxtune.train scripts/quickstart/pretrain.yaml "$@"
# The run leaves fp32 weights; the package holds bf16.
"$python" -c '
import sys, jaxtune
model, tokenizer = jaxtune.from_pretrained(sys.argv[1], dtype="bfloat16")
jaxtune.save_pretrained(model, sys.argv[2], tokenizer=tokenizer)' "$work/run/merged" "$folder"
PYTHONPATH=".:${PYTHONPATH:-}" "$python" scripts/quickstart/evaluate_base.py "$folder" --problems 128 --show 2
