#!/usr/bin/env bash
# Everything that only a GPU can show, measured again: the tests that need one, and results/*-h200.json.
#
#     benchmarks/gpu.sh [tests] [attention] [steps] [inside] [curvature] [landscape] [training]   # default: all, half an hour
#
# Results go to $OUT, by default benchmarks/results. A part that fails does not keep the others from running. The tests compile
# many kernels: with pytest-xdist installed and PYTEST_ADDOPTS="-n 10" they take four minutes on 16 cores instead of ten.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
failed=()

part() {
    echo "== $1"
    SECONDS=0
    "${@:2}" || failed+=("$1")
    echo "== $1: $SECONDS s"
}

tests() { python -m pytest -q -m cuda -p no:cacheprovider tests; }

attention() {
    python benchmarks/regular_attention.py --device cuda --batch 128 --dtype bfloat16 --grids 56 28 14 7 --no-bias \
        --json "$out/regular_attention-h200.json"
}

steps() {
    python benchmarks/training_speed.py --models swin_tiny_r swin_tiny_m --device cuda --batch 128 --passes 5 --rounds 9 \
        --bfloat16 --compile --mode reduce-overhead --json "$out/training_speed-h200.json"
}

inside() {
    python benchmarks/inside.py --sections attention receptive_field stream --device cuda --rounds 5 \
        --json "$out/inside-h200.json"
}

curvature() {
    python benchmarks/curvature.py --sections hessian --device cuda --batch 16 --rounds 5 --most 300 \
        --json "$out/curvature-h200.json"
}

landscape() {
    python benchmarks/landscape.py --device cuda --points 21 --images 512 --batch 256 --rounds 1 \
        --json "$out/landscape-h200.json"
}

training() {
    python benchmarks/training.py step --device cuda --compile --rounds 8 --json "$out/training-step-h200.json" &&
        python benchmarks/training.py resident --device cuda --compile --json "$out/training-resident-h200.json"
}

all=(tests attention steps inside curvature landscape training)
parts=("${@:-${all[@]}}")
for name in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $name "* ]] || { echo "there is no part $name; choose from: ${all[*]}" >&2; exit 2; }
done
for name in "${parts[@]}"; do part "$name" "$name"; done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }
