#!/usr/bin/env bash
# Takes `python -m benchmarks.card` to a GPU machine without a network: Hopper, CPython 3.12 with PyTorch 2.11, x86-64.
#   card.sh pack PIECE ARCHIVE          here; PIECE holds SGLang 0.5.16 without FlashInfer's sources, and models/
#   card.sh run ARCHIVE SECONDS CASE…   there, in the repository; OUT gets results/card.json and logs.tar.xz
# TOKENIZER is a model's folder, with weights for the cases plain and ngram; data/docs.parquet must be there for those.
set -euo pipefail
site=/tmp/site
case ${1:-} in
pack)
  piece=$2 archive=$3
  rm -rf $site; mkdir -p $site/wheels "$(dirname "$archive")"
  tar -xzf "$piece" -C $site
  platforms=(--platform manylinux2014_x86_64)
  for glibc in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  # what batchrunner imports, PyTorch's machines lack, and SGLang does not bring
  for package in jsonschema-rs pyroaring tenacity; do grep -E "^$package==" constraints.txt; done > $site/wanted
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 "${platforms[@]}" \
    --dest $site/wheels --requirement $site/wanted
  for wheel in $site/wheels/*.whl; do python3 -m zipfile -e "$wheel" $site; done
  # sgl_kernel would ask FlashInfer, whose CUDA sources are too large to travel, for norms and sampling
  sed -i 's/_has_flashinfer = True/_has_flashinfer = False/' $site/sgl_kernel/{elementwise,sampling}.py
  for file in $site/models/*/tokenizer_config.json; do sed -i 's/"model_max_length": [0-9]*/"model_max_length": 8192/' "$file"; done
  tar --exclude ./wheels --exclude ./wanted -C $site -cf - . | xz -6 -T0 > "$archive"
  ls -l "$archive"
  ;;
run)
  archive=$2 seconds=$3 out=${OUT:-out/card}
  if [ ! -d $site/sglang ]; then mkdir -p $site; tar -xJf "$archive" -C $site --no-same-owner; fi
  export PYTHONPATH=$PWD:$site TVM_FFI_CACHE_DIR=$site/jit-cache HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
  export SGLANG_IS_FLASHINFER_AVAILABLE=false
  flags='{"attention-backend": "triton", "sampling-backend": "pytorch", "disable-prefill-cuda-graph": true}'
  keep=$(mktemp -d)
  python3 -m benchmarks.card "${@:4}" --seconds "$seconds" --keep "$keep" --args "$flags" \
    --tokenizer "${TOKENIZER:-$site/models/smollm2-135m}" || echo "ended with $?"
  mkdir -p "$out/results"
  cp benchmarks/results/card.json "$out/results"
  tar -cJf "$out/logs.tar.xz" --exclude '*.parquet' --exclude model -C "$keep" .
  ;;
*)
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
  ;;
esac
