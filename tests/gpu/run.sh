#!/usr/bin/env bash
# The tests that need a GPU, on the machine that has it. A test that cannot run there fails.
#
#     tests/gpu/run.sh                   builds here (build-gpu) and runs everything
#     tests/gpu/run.sh pack FILE         builds, and packs programs, their libraries, cases and test
#                                        data for a GPU host with no compiler, packages or network
#     tests/gpu/run.sh unpack FILE       there: in a copy of the repository, which then runs with
#     tests/gpu/run.sh run [STEP...]     what is in build-gpu; steps: kernels memory node cases e2e
#                                        chaos sanitizer (all of these by default), bench, attend (its
#                                        part about attention, and PyTorch's beside it), fidelity
#
# $LARDER_GPU_ARCH: what to compile for (90a-real); $LARDER_GPU_FUZZ_SECONDS: of the fuzz on the device
# (120); $LARDER_GPU_STEP_SECONDS: of one program at most (1800); $LARDER_GPU_LOGS: where the logs go
# (build-gpu/logs). fidelity goes on where it stopped; no combination is begun $LARDER_FIDELITY_SECONDS
# (1200) after its start. $LARDER_REFERENCE_MODELS: a folder with small-lm and sample.txt, for it too.
# Programs have the path of their build folder inside: unpacked elsewhere, the same path is made to
# lead here by a symbolic link. Exit status 0 if all is well.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 1
folder=build-gpu
logs=${LARDER_GPU_LOGS:-$root/$folder/logs}
export LARDER_REQUIRE_GPU=1 LARDER_GPU_FUZZ_SECONDS=${LARDER_GPU_FUZZ_SECONDS:-120}
parallel=${JOBS:-8}

kernel_tests=(cuda_rows_test cuda_attend_test cuda_attend_decode_test cuda_device_calls_test)
# End to end tests of host pools that hold for pools on a GPU too, and the cases that do not: the CPU
# looks at the pool's bytes there, or kills come before an executor is up, or after the text's end.
e2e_tests=(cases_blocks cases_daemon engine operations rings sequences survival survival_calls
  survival_processes survival_sessions survival_text)
host_only='a block is not published before*,when keeper and larderd have both ended*'
host_only+=',an executor killed under load*,text goes on in mid-sentence*'
programs=(bin/larderd bin/larder-executor bin/larder-keeper bin/larderctl bin/larder-generate
  bin/larder-chaos bin/readme_example bin/gpu_bench
  bin/kernels_gpu_bench bin/attention_error)

build() {
  cmake -S . -B $folder -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLARDER_CUDA=ON \
    "-DLARDER_CUDA_ARCHITECTURES=${LARDER_GPU_ARCH:-90a-real}" >/dev/null &&
    cmake --build $folder -j "${JOBS:-$(nproc)}" --target all
}

packed_files() {
  local name
  (cd $folder && for name in "${programs[@]}"; do [ ! -e "$name" ] || echo "$name"; done
    find tests/kernels/cuda tests/gpu -type f -perm -u+x ! -name '*.so'
    for name in tests/allocator/{memory_provider_test,cuda_vmm_test,segment_creator} \
      fake_cuda/libcuda.so.1 "${e2e_tests[@]/#/tests/e2e/e2e_}"; do
      case $name in *e2e_*) name+=_test ;; esac
      [ ! -e "$name" ] || echo "$name"
    done)
}

# Debug sections stay behind, and of libraries everything that a Linux with glibc 2.36 has. Programs
# share the kernels, their largest part: a window over several of them keeps that once.
pack() {
  local target stage file
  target=$(realpath -m "$1") && stage=$(mktemp -d) || return 1
  packed_files >"$stage/files" || return 1
  while read -r file; do
    mkdir -p "$stage/$folder/$(dirname "$file")" &&
      strip --strip-debug -o "$stage/$folder/$file" "$folder/$file" || return 1
    ldd "$folder/$file"
  done <"$stage/files" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|libcuda|libcublas[A-Za-z]*)\.so' |
    while read -r file; do
      mkdir -p "$stage/$folder/lib" && cp -L "$file" "$stage/$folder/lib/" || return 1
    done
  echo "$root" >"$stage/$folder/built-in" &&
    tar -C "$stage" -cf - $folder | xz --lzma2=preset=4,dict=128MiB >"$target" && rm -rf "$stage" &&
    ls -l "$target"
}

unpack() {
  xz -dc "$1" | tar -xf - || return 1
  local built_in
  built_in=$(cat $folder/built-in)
  [ "$built_in" -ef "$root" ] || { mkdir -p "$(dirname "$built_in")" && ln -sfn "$root" "$built_in"; }
}

limited() { timeout "${LARDER_GPU_STEP_SECONDS:-1800}" "$@"; }

# Every file has a daemon of its own, so that several run at a time.
cases() {
  printf '%s\n' tests/cases/*.json | limited xargs -P "$parallel" -n 1 \
    $folder/bin/larderctl replay --embedded --memory cuda
}

bench() { limited "$folder/bin/$1" "${@:3}" >"$logs/$2"; }

fidelity() {
  tests/bench/fidelity.py run --device auto --jobs 4 --output "$logs/fidelity.json" \
    --time-limit "${LARDER_FIDELITY_SECONDS:-1200}" "$@"
}

# A server of our own; nothing of the GPU's settings changes.
with_mps() {
  local status control
  control=$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control) || return 1
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  "$control" -d || return 1
  "$@"
  status=$?
  echo 'quit -t 5' | "$control"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  return $status
}

# step NAME COMMAND...: a program, with a limit to its time, or one of the functions above.
step() {
  local name=$1 started=$SECONDS
  shift
  if { [ "$(type -t "$1")" = function ] || set -- limited "$@"; } && "$@" >"$logs/$name.log" 2>&1; then
    printf 'ok      %-28s %4d s  %s\n' "$name" $((SECONDS - started)) \
      "$(grep -aE 'test cases:|files, |NOTE: ' "$logs/$name.log" | tail -n 1)"
  else
    printf 'FAILED  %-28s %4d s\n' "$name" $((SECONDS - started))
    echo "$name" >>"$logs/failed"
    grep -aE 'ERROR|FATAL|refused|Error' "$logs/$name.log" | head -n 8
    tail -n 12 "$logs/$name.log"
  fi
}

steps_of() {
  local name options
  case $1 in
  kernels) for name in "${kernel_tests[@]}"; do step "$name" "$folder/tests/kernels/cuda/$name"; done ;;
  memory)
    for name in memory_provider_test cuda_vmm_test; do
      step $name $folder/tests/allocator/$name
    done
    ;;
  node) for name in "$folder"/tests/gpu/gpu_*_test; do step "$(basename "$name")" "$name"; done ;;
  cases) step cases cases ;;
  e2e)
    export LARDER_TEST_DEVICE=auto
    for name in "${e2e_tests[@]}"; do
      step "e2e_$name" "$folder/tests/e2e/e2e_${name}_test" "-tce=$host_only" &
      [ "$(jobs -rp | wc -l)" -lt "$parallel" ] || wait -n
    done
    wait
    ;;
  bench)
    step kernels-bench bench kernels_gpu_bench kernels-gpu.json append/ gather/ convert/ copy/ scrub/ checksum/
    step bench bench gpu_bench gpu.json
    step bench-mps with_mps bench gpu_bench gpu-mps.json
    ;;
  attend)
    step attend-bench bench kernels_gpu_bench attend.json attend
    step attend-peer tests/bench/attend_peer.py "$logs/attend.json"
    ;;
  fidelity)
    step fidelity fidelity
    local models=${LARDER_REFERENCE_MODELS:-}
    [ -z "$models" ] || for name in tests/data/tiny-lm "$models/small-lm"; do
      step "fidelity-$(basename "$name")" fidelity --model "$name" --text "$models/sample.txt" \
        --first-window 0 --windows 200 --calibration-windows 43
    done
    ;;
  chaos)
    LARDER_TEST_DEVICE=auto LARDER_CHAOS_ROUNDS=${LARDER_CHAOS_ROUNDS:-100} step chaos $folder/bin/larder-chaos
    ;;
  sanitizer)
    # Every row, on small shapes. Left out: refusals that the tests provoke; bytes between outputs
    # that come back with them unwritten and unused; a kernel that waits for another stream's, which
    # the tool would run one after the other.
    export LARDER_GPU_FUZZ_SECONDS=1
    for name in memcheck racecheck initcheck; do
      options=(--tool "$name" --error-exitcode 9)
      case $name in
      memcheck) options+=(--report-api-errors no) ;;
      initcheck) options+=(--check-api-memory-access no) ;;
      esac
      step "$name" compute-sanitizer "${options[@]}" \
        $folder/tests/kernels/cuda/cuda_device_calls_test '-tce=work waits for a word*'
    done
    ;;
  *) echo "unknown step $1" | tee -a "$logs/failed" ;;
  esac
}

run() {
  mkdir -p "$logs" && rm -f "$logs/failed"
  local libraries
  [ ! -d $folder/lib ] || export LD_LIBRARY_PATH=$root/$folder/lib:${LD_LIBRARY_PATH:-}
  # Of the toolkit, or of Python's packages for CUDA.
  libraries=$(dirname "$(find -L /usr/local/cuda*/ /usr/lib/python3* /usr/local/lib/python3* \
    -name libcublas.so.13 2>/dev/null | head -n 1)" 2>/dev/null)
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$libraries
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,uuid,driver_version --format=csv,noheader
  local part
  [ $# -gt 0 ] || set -- kernels memory node cases e2e chaos sanitizer
  for part in "$@"; do steps_of "$part"; done
  # Steps that ran beside others told it in the file.
  echo "failed: $(sort -u "$logs/failed" 2>/dev/null | tr '\n' ' ')"
  [ ! -s "$logs/failed" ]
}

case ${1:-} in
'') build && run ;;
pack) build && pack "$2" ;;
pack-only) pack "$2" ;;
unpack) unpack "$2" ;;
run) shift && run "$@" ;;
*) sed -n '2,20s/^# \{0,1\}//p' "$0" && exit 1 ;;
esac
