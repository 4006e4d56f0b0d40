#!/usr/bin/env bash
# record.sh FOLDER PART...: makes the records of the named parts again, on the GPU of this machine.
#
#   bash benchmarks/record.sh benchmarks/results step packed startup
#   bash benchmarks/record.sh --list
#
# Every part is a process (or several) of its own with a time limit; one that fails costs only itself. What a part
# prints goes to FOLDER/logs/PART.log. Where there is no git checkout, JAXTUNE_COMMIT names the commit.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
data=${JAXTUNE_TEST_DATA:-}  # for `trajectory`: tokenizers and rows

declare -A limit  # seconds
part_step() { $python benchmarks/train/step.py --output "$1/step_8b_8x2048.json"; }
limit[step]=120
part_long() { $python benchmarks/train/step.py --rows 2 --length 8192 --output "$1/step_8b_2x8192.json"; }
limit[long]=120
part_packed() { $python benchmarks/train/step.py --documents packed --output "$1/step_8b_packed.json"; }
limit[packed]=150
part_nf4() { $python benchmarks/train/step.py --load-in nf4 --output "$1/step_8b_nf4_8x2048.json"; }
limit[nf4]=150
part_nf4_parts() {
    $python benchmarks/train/step.py --load-in nf4 --steps 4 --cache "$(mktemp -d)" --profile "$(mktemp -d)" \
        --output "$1/step_8b_nf4_parts.json"
}
limit[nf4_parts]=120
part_nf4_32b() {
    $python benchmarks/train/step.py --shape qwen3-32b --load-in nf4 --rows 4 --micro-batches 4 --plan recompute \
        --steps 5 --cache "$(mktemp -d)" --output "$1/step_qwen3_32b_nf4_4x2048.json"
}
limit[nf4_32b]=240
part_throughput() { $python benchmarks/train/throughput.py --output "$1/throughput.json"; }
limit[throughput]=240
part_startup() { $python benchmarks/train/startup.py --output "$1/startup_8b.json"; }
limit[startup]=240
part_pair() {
    local folder
    folder=$(mktemp -d)
    $python benchmarks/train/profile_pair.py "$folder" &&
        cp "$folder/pair.json" "$1/pair_8b.json" && cp "$folder/compare.html" "$1/pair_8b.html" && picture "$1/pair_8b"
}
picture() { # FILE without its ending: the first screen of a page; where there is no Chromium, say what is missing
    rm -f "$1.png"
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,960 \
        --screenshot="$1.png" "file://$(realpath "$1.html")" >/dev/null 2>&1 ||
        echo "no picture of $1.html: run 'bash benchmarks/record.sh --picture $1' where Chromium is installed"
}
limit[pair]=180
part_profile_check() { $python benchmarks/train/profile_check.py --output "$1/profile_check.json"; }
limit[profile_check]=90
part_trajectory() {
    $python benchmarks/train/trajectory.py --tokenizer "$data/tokenizers/qwen2.5" \
        --pretrain "$data/datasets/text/tinystories_first60.jsonl" "$data/datasets/text/c4_demo.jsonl" \
        "$data/datasets/gsm8k/train.jsonl" --rows "$data/datasets/gsm8k/train.jsonl" --output "$1/trajectory.json"
}
limit[trajectory]=280
# The blocks of the attention kernels: FOLDER/tuned/ begins as the packaged file and can replace it.
part_tune() {
    mkdir -p "$1/tuned" && cp -n jaxtune/pallas/tuned/*.json "$1/tuned/"
    export JAXTUNE_TUNING_DIR=$1/tuned
    local tune="$python -m jaxtune.cli tune"
    $tune --head-dim 64 --documents whole --kernels forward &&
        $tune --head-dim 128 --documents whole --rows 1 --length 32768 --window 128 &&
        $tune --head-dim 128 --documents whole &&
        $tune --head-dim 256 --heads 16 --soft-cap 50 --kernels forward
}
limit[tune]=500
# With the blocks of `tune`, if that was run.
part_attention() { JAXTUNE_TUNING_DIR=$1/tuned $python benchmarks/kernels/attention.py --output "$1/attention.json"; }
limit[attention]=220
part_attention_pair() { $python benchmarks/train/attention_pair.py --output "$1/attention_pair_8b.json"; }
limit[attention_pair]=300
part_quant_matmul() { $python benchmarks/kernels/quant_matmul.py --output "$1/quant_matmul.json"; }
limit[quant_matmul]=150
part_moe() { $python benchmarks/kernels/moe.py --output "$1/moe.json"; }
limit[moe]=900
part_triton() { $python benchmarks/kernels/triton_backends.py --output "$1/triton_backends.json"; }
limit[triton]=120
part_packing_metadata() { $python benchmarks/train/packing_metadata.py --output "$1/packing_metadata.json"; }
limit[packing_metadata]=400
part_qlora_load() { $python benchmarks/train/qlora_load.py --output "$1/qlora_load.json"; }
limit[qlora_load]=120
# Memory: each part adds its cases to one file.
memory() { $python benchmarks/train/memory.py --output "$1/memory.json" --cases "$2" "${@:3}"; }
part_memory() { memory "$1" kept,recompute,inputs_offloaded,inputs_serial,24gb,24gb_one,16gb,16gb_one,10.8gb; }
limit[memory]=600
part_memory_transfers() {
    memory "$1" link_bound,link_bound_serial,compile,document_recompute,document,loss,equal_plans,3b
}
limit[memory_transfers]=600
part_memory_sizes() {
    memory "$1" 14b_recompute,14b_offloaded,14b_serial,32b_recompute,32b_offloaded,32b_serial,1b_full
}
limit[memory_sizes]=600
part_memory_full() {
    memory "$1" full_8b,full_8b_kept,full_8b_states_on_host,full_8b_adamw_on_host,longest_check
}
limit[memory_full]=500
part_memory_longest() { memory "$1" longest --timeout 165 --seconds 590; }
limit[memory_longest]=600

# What the field's claims are worth, arm by arm; call it until it says that nothing is left.
part_ablation() { $python benchmarks/train/ablation.py --output "$1/ablation.json" --seconds 560; }
limit[ablation]=600

# Models of experts, each under the peak memory that Unsloth takes for it (50.9, 24.2, 75.1 and 30.7 GB); then packed, at
# 4,096 and 65,536 tokens a step. The planner chooses plan and micro-batches. Programs are compiled side by side.
declare -A experts=(
    [gpt_oss]="--shape gpt-oss-20b --budget-gb 50.9"
    [gpt_oss_nf4]="--shape gpt-oss-20b --budget-gb 24.2 --load-in nf4"
    [qwen3_moe]="--shape qwen3-30b-a3b --budget-gb 75.1 --optim adamw_8bit"
    [qwen3_moe_nf4]="--shape qwen3-30b-a3b --budget-gb 30.7 --optim adamw_8bit --load-in nf4"
)
declare -A file=(
    [gpt_oss]=step_gpt_oss_20b [gpt_oss_nf4]=step_gpt_oss_20b_nf4
    [qwen3_moe]=step_qwen3_30b_a3b [qwen3_moe_nf4]=step_qwen3_30b_a3b_nf4
)
declare -A shapes=([_8x2048]="--rows 8" [_packed_4k]="--rows 2 --documents packed" [_packed_65k]="--rows 32 --documents packed")
steps() { # FOLDER "MODEL ..." "SHAPE ..."
    local folder=$1 model shape cache cases=()
    cache=$(mktemp -d)
    for model in $2; do
        for shape in $3; do cases+=("${experts[$model]} ${shapes[$shape]} --plan auto --steps 6"); done
    done
    $python benchmarks/train/compile_ahead.py "$cache" "${cases[@]}"
    for model in $2; do
        for shape in $3; do
            # shellcheck disable=SC2086 - arguments
            $python benchmarks/train/step.py ${experts[$model]} ${shapes[$shape]} --plan auto --steps 6 \
                --cache "$cache" --output "$folder/${file[$model]}$shape.json"
        done
    done
}
part_gpt_oss() { steps "$1" "gpt_oss gpt_oss_nf4" _8x2048; }
limit[gpt_oss]=300
part_qwen3_moe() { steps "$1" "qwen3_moe qwen3_moe_nf4" _8x2048; }
limit[qwen3_moe]=500
part_gpt_oss_packed() { steps "$1" "gpt_oss gpt_oss_nf4" "_packed_4k _packed_65k"; }
limit[gpt_oss_packed]=590
part_qwen3_moe_packed() { steps "$1" "qwen3_moe qwen3_moe_nf4" "_packed_4k _packed_65k"; }
limit[qwen3_moe_packed]=900

if [ "${1:-}" = --list ]; then
    for part in "${!limit[@]}"; do echo "$part (at most ${limit[$part]} s)"; done | sort
    exit 0
fi
if [ "${1:-}" = --picture ]; then
    picture "$2"
    exit
fi
if [ "${1:-}" = --one ]; then  # FOLDER PART, in a process of its own that can be stopped
    "part_$3" "$2"
    exit
fi
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
shift
for part in "$@"; do
    [ -n "${limit[$part]:-}" ] || { echo "no part $part: bash benchmarks/record.sh --list shows them" >&2; exit 2; }
done

mkdir -p "$folder/logs"
failed=0
for part in "$@"; do
    log=$folder/logs/$part.log
    begun=$SECONDS
    timeout -k 5 "${limit[$part]}" bash benchmarks/record.sh --one "$folder" "$part" >"$log" 2>&1
    rc=$?
    echo "$part: exit status $rc after $((SECONDS - begun)) s"
    if [ $rc -ne 0 ]; then
        failed=1
        tail -n 15 "$log"
    fi
done
exit $failed
