#!/usr/bin/env bash
# One day with a GPU: everything that needs one, in pieces of at most ten minutes, with no network.
#
#   benchmarks/gpu_day.sh wheels                  # before, with a network: what that machine may lack, into wheels/
#   benchmarks/gpu_day.sh ahead                   # before, without a GPU: kernels into build/gpu_day/triton, to take along
#   benchmarks/gpu_day.sh import numerics         # there: pieces in this order
#   benchmarks/gpu_day.sh --total 590 all         # all of them within 590 seconds; what is left goes on in the next call
#   benchmarks/gpu_day.sh --rehearse all          # no GPU: tiny, in Triton's interpreter; figures mean nothing
#
# Pieces: import numerics kernels tune kernels-tuned decode. `all` is these; alone stand `sanitize` (compute-sanitizer) and
# `configurations` (each case of the kernels under all that the tuner knows; compiled ahead by gpu_day_ahead.py --what).
# A piece writes OUT/<piece>.json, and goes on where it was stopped; one that is done is left out but for --again.
# One piece's failure stops no other; the exit code tells whether any failed.
#
# Environment: OUT (folder of results), PYTHON, WHEELS (folder of wheels), GPU_DAY_DECODE (arguments for the decode piece,
# such as "--contexts 1024 --variants int8"), GPU_DAY_TUNE (likewise), GPU_DAY_PROCESSES (of tests at once; 12).
set -uo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
fail() {
  echo "gpu_day: $*" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all=(import numerics kernels tune kernels-tuned decode)
rehearse=() again="" seconds=570 total=0 pieces=()
while (($#)); do
  case $1 in
    --rehearse) rehearse=(--rehearse) ;;
    --again) again=1 ;;
    --seconds | --total)
      [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$1: expected a number of seconds, got '${2:-}'"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    all) pieces+=("${all[@]}") ;;
    wheels | ahead | import | numerics | kernels | tune | kernels-tuned | decode | sanitize | configurations) pieces+=("$1") ;;
    *) fail "no piece '$1': expected wheels, ahead, ${all[*]}, sanitize, configurations or all" ;;
  esac
  shift
done
((${#pieces[@]})) || {
  usage >&2
  exit 2
}

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi
# Before the folder changes: the caller's paths are relative to where the caller stands.
export OUT
OUT=$(realpath -m "${OUT:-$root/benchmarks/results/gpu_day}")
if [[ ${pieces[*]} == wheels ]]; then
  exec "$PYTHON" "$root/benchmarks/gpu_day_setup.py" wheels
fi
if ((!${#rehearse[@]})) && [[ ${pieces[*]} != ahead ]] && ! nvidia-smi -L 2>/dev/null | grep -q GPU && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
  fail "needs an NVIDIA GPU, and there is none here; --rehearse shows that the script works"
fi

cd "$root" || exit 2
place=$root/build/gpu_day
mkdir -p "$OUT" "$place"
mkdir -p -m 700 "$place/cache" "$place/shipped"
log=$OUT/day.log
paths=$("$PYTHON" benchmarks/gpu_day_setup.py install) || fail "kvcompile cannot be imported here"
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Kept between calls, so that a piece that goes on finds what was compiled.
export KVCOMPILE_CACHE_DIR=$place/cache
export TRITON_CACHE_DIR=$place/triton TORCHINDUCTOR_CACHE_DIR=$place/inductor
if ((${#rehearse[@]})); then
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=""
fi

# piece NAME COMMAND...: within its time, into the log, and recorded.
piece() {
  local name=$1 limit=$seconds began=$SECONDS code
  shift
  if ((total && total - SECONDS < limit)); then limit=$((total - SECONDS)); fi
  if ((limit < 20)); then
    echo "$name: no time left in this call" | tee -a "$log"
    return 1
  fi
  if [[ -z $again ]] && "$PYTHON" benchmarks/gpu_day_record.py "$name" "${rehearse[@]}" --is-done; then
    echo "$name: done before, see $OUT/$name.json (--again measures it again)"
    return 0
  fi
  # SIGINT first: Python's own cleaning up, and what has been measured by then is kept.
  GPU_DAY_SECONDS=$limit timeout --signal=INT --kill-after=15 "$limit" "$@" "${rehearse[@]}" ${again:+--again} 2>&1 |
    tee -a "$log"
  code=${PIPESTATUS[0]}
  "$PYTHON" benchmarks/gpu_day_record.py "$name" "${rehearse[@]}" --code "$code" --seconds $((SECONDS - began)) |
    tee -a "$log"
  return "$code"
}

kernels() {
  local name=$1
  # The interpreter needs minutes for all cases: one of each kind shows that the piece works.
  local few=()
  ((${#rehearse[@]})) && few=(--only "bf16 B1 32k" --only "bf16 B64 one of" --only "bf16 B1 prompt" --only "append int8 B1" --only "linear SmolLM2")
  piece "$name" "$PYTHON" benchmarks/kernels.py --out "$OUT/$name.json" --resume "${few[@]}"
}

failed=()
for name in "${pieces[@]}"; do
  echo "== $name, $(date -u '+%Y-%m-%d %H:%M:%S') UTC" | tee -a "$log"
  case $name in
    wheels) "$PYTHON" benchmarks/gpu_day_setup.py wheels ;;
    ahead) TRITON_STORE_BINARY_ONLY=1 "$PYTHON" -W ignore benchmarks/gpu_day_ahead.py ;;
    import) piece import "$PYTHON" benchmarks/gpu_day_import.py ;;
    numerics) piece numerics "$PYTHON" benchmarks/gpu_day_numerics.py ;;
    sanitize) piece sanitize "$PYTHON" benchmarks/gpu_day_numerics.py --sanitize ;;
    configurations)
      few=()
      ((${#rehearse[@]})) && few=(--only "int8 B32 4k" --only "linear SmolLM2 gate")
      KVCOMPILE_CACHE_DIR=$place/shipped piece configurations "$PYTHON" benchmarks/kernel_configurations.py \
        --seconds $((seconds < 60 ? seconds / 2 : seconds - 30)) --out "$OUT/configurations.json" "${few[@]}"
      ;;
    # The table that ships, not what `tune` measured: without and with it are two pieces.
    kernels) KVCOMPILE_CACHE_DIR=$place/shipped kernels kernels ;;
    kernels-tuned) kernels kernels-tuned ;;
    # shellcheck disable=SC2086  # arguments, split at spaces
    tune) piece tune "$PYTHON" benchmarks/gpu_day_tune.py ${GPU_DAY_TUNE:-} ;;
    # shellcheck disable=SC2086
    decode) piece decode "$PYTHON" benchmarks/gpu_day_decode.py ${GPU_DAY_DECODE:-} ;;
  esac || failed+=("$name")
done
if ((${#failed[@]})); then
  echo "failed or not finished: ${failed[*]}" | tee -a "$log" >&2
  exit 1
fi
