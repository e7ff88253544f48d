#!/usr/bin/env bash
# Takes `python -m benchmarks.card` to a GPU machine without a network: Hopper, CPython 3.12 with PyTorch 2.11, x86-64.
#
#   card.sh pack KIT FOLDER
#       Where there is a network: writes two archives to FOLDER. KIT has piece-1.tar.gz, which is SGLang 0.5.16 with a
#       tokenizer in models/.
#   card.sh run FOLDER SECONDS [CASE…]
#       On the GPU machine, in the repository: unpacks the archives of FOLDER that are new, and measures the cases that
#       fit into the time. OUT gets results/card.json and logs.tar.xz. Copy results/card.json to benchmarks/results/
#       before the next call: it goes on with the next case. TOKENIZER is the directory of a model with weights, for
#       the cases with texts, which also need data/docs.parquet; without it, leave these cases out.
#
# Each archive is smaller than 60 MB, so that archives can be carried one by one.
set -euo pipefail
site=/tmp/site

pack() {
  local kit=$1 folder=$2 stage package glibc
  stage=$(mktemp -d)
  mkdir -p "$stage/site" "$stage/more" "$stage/wheels" "$folder"
  tar -xzf "$kit/piece-1.tar.gz" -C "$stage/site"
  local platforms=(--platform manylinux2014_x86_64)
  for glibc in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  # These packages are imported by batchrunner, and come neither with PyTorch's image nor with SGLang.
  for package in duckdb jsonschema-rs pyroaring tenacity; do
    grep -E "^$package==" constraints.txt
  done > "$stage/requirements"
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 "${platforms[@]}" \
    --dest "$stage/wheels" --requirement "$stage/requirements"
  for wheel in "$stage"/wheels/*.whl; do
    # DuckDB is large. Only runs that sort their input need it, so it has an archive of its own.
    case $wheel in */duckdb-*) target=more ;; *) target=site ;; esac
    python3 -m zipfile -e "$wheel" "$stage/$target"
  done
  # sgl_kernel would use FlashInfer for norms and sampling, but its CUDA sources are too large to carry.
  sed -i 's/_has_flashinfer = True/_has_flashinfer = False/' "$stage"/site/sgl_kernel/{elementwise,sampling}.py
  for file in "$stage"/site/models/*/tokenizer_config.json; do
    sed -i 's/"model_max_length": [0-9]*/"model_max_length": 8192/' "$file"
  done
  tar -C "$stage/site" -cf - . | xz -6 -T0 > "$folder/1-engine.tar.xz"
  tar -C "$stage/more" -cf - . | xz -6 -T0 > "$folder/2-duckdb.tar.xz"
  rm -rf "$stage"
  ls -l "$folder"
}

unpack() {
  local folder=$1 archive
  mkdir -p $site
  for archive in "$folder"/*.tar.xz; do
    if [ -e "$archive" ] && [ ! -e "$site/.${archive##*/}" ]; then
      tar -xJf "$archive" -C $site --no-same-owner
      touch "$site/.${archive##*/}"
    fi
  done
}

run() {
  local folder=$1 seconds=$2 out=${OUT:-out/card} keep flags
  unpack "$folder"
  export PYTHONPATH=$PWD:$site TVM_FFI_CACHE_DIR=$site/jit-cache HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
  export SGLANG_IS_FLASHINFER_AVAILABLE=false
  flags='{"attention-backend": "triton", "sampling-backend": "pytorch", "disable-prefill-cuda-graph": true}'
  keep=$(mktemp -d)
  python3 -m benchmarks.card "${@:3}" --seconds "$seconds" --keep "$keep" --args "$flags" \
    --tokenizer "${TOKENIZER:-$site/models/smollm2-135m}" || echo "ended with $?"
  mkdir -p "$out/results"
  cp benchmarks/results/card.json "$out/results"
  tar -cJf "$out/logs.tar.xz" --exclude '*.parquet' --exclude model -C "$keep" .
}

case ${1:-} in
pack) pack "$2" "$3" ;;
run) run "${@:2}" ;;
*)
  sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
