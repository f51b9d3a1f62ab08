#!/usr/bin/env bash
# The one check command. Works from any directory, in a fresh clone, on a bare Debian 12.
#
#     tests/check.sh fast   format, house rules, headers, build, tests (before every push)
#     tests/check.sh asan   all tests with AddressSanitizer and UBSan (build-asan)
#     tests/check.sh tsan   the tests labelled "threads" with ThreadSanitizer (build-tsan)
#     tests/check.sh tidy   clang-tidy; sources that were clean before are not looked at again
#     tests/check.sh ci     everything, packages first
#     tests/check.sh all    ci, a longer fuzz run ($LARDER_FUZZ_SECONDS each, default 300), 1000 kills
#                           by larder-chaos instead of 200, 100 million simulated events instead of 2,
#                           and the mutants that the simulation must find
#
# One line per step with its seconds; of a failed step the command and the end of its log. The logs
# are in build/check. $JOBS overrides the number of parallel jobs. The last line is
# "N passed, N failed, N skipped": the tests of every build together. Exit status 0 if all is well.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
jobs=${JOBS:-$(nproc)}
logs=$root/build/check
export CTEST_OUTPUT_ON_FAILURE=1 PYTHONDONTWRITEBYTECODE=1
failed_steps=()

# step NAME COMMAND...: runs COMMAND with its output in the log; returns its status. Callers look at
# the status, which switches `set -e` off inside: functions that are steps chain with &&.
step() {
  local name=$1 log=$logs/$1.log started=$SECONDS status
  shift
  ("$@") >"$log" 2>&1 && status=0 || status=$?
  if [ "$status" -eq 0 ]; then
    printf 'ok      %-14s %4d s  %s\n' "$name" $((SECONDS - started)) "$(note "$log")"
    return 0
  fi
  printf 'FAILED  %-14s %4d s\n' "$name" $((SECONDS - started))
  failed_steps+=("$name")
  echo "--- the last lines of build/check/$name.log"
  tail -n 60 "$log"
  echo "--- command: $(grep '^\$ ' "$log" | tail -n 1 | cut -c3-)"
  return "$status"
}

# run COMMAND...: names the command in the log, then runs it.
run() { printf '$ %s\n' "$*"; "$@"; }

# The line of a log that is worth showing when all went well.
note() { grep -E '^(NOTE: |[0-9]+% tests passed|[0-9]+ (files keep|sources,))' "$1" | tail -n 1; }

# ------------------------------------------------------------------------------------------- steps

listed_packages() { sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' deploy/packages.txt; }

missing_packages() {
  local package
  for package in $(listed_packages); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      printf '%s ' "$package"
  done
}

packages() {
  local missing
  if ! command -v dpkg-query >/dev/null; then
    echo 'NOTE: no dpkg here; the packages of deploy/packages.txt are taken to be installed'
    return 0
  fi
  missing=$(missing_packages)
  [ -n "$missing" ] || { echo 'NOTE: all installed'; return 0; }
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086  # one word per package
  run apt-get update && run apt-get install -y --no-install-recommends $missing &&
    echo "NOTE: installed $missing"
}

# The CUDA compiler: the machine's own, or NVIDIA's wheels from PyPI, as Debian 12 has none so new.
cuda_wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-culibos==13.0.85
  nvidia-cublas==13.1.0.3)
wheel_folder() { [ ! -d build/cuda ] || find build/cuda -path '*/nvidia/cu13' -type d -print -quit; }
toolkit() {
  if command -v nvcc >/dev/null; then
    echo "NOTE: $(command -v nvcc)"
    return 0
  fi
  run python3 -m venv build/cuda && run build/cuda/bin/pip install -q "${cuda_wheels[@]}" &&
    ln -sfn lib "$(wheel_folder)/lib64" && echo 'NOTE: nvcc of PyPI, in build/cuda'
}
use_toolkit() {
  local folder
  if [ -x /usr/local/cuda/bin/nvcc ]; then export PATH=$PATH:/usr/local/cuda/bin; fi
  folder=$(wheel_folder)
  if [ -n "$folder" ]; then export PATH=$PATH:$root/$folder/bin; fi
}

# Stops here if a package is missing and this user cannot install it.
require_packages() {
  local missing='' sudo=''
  if command -v dpkg-query >/dev/null; then missing=$(missing_packages); fi
  if [ -z "$missing" ]; then return 0; fi
  if [ "$(id -u)" -ne 0 ]; then
    sudo='sudo '
  elif [ "$1" = install ]; then
    return 0
  fi
  echo "Missing packages: $missing"
  echo "Install them with: ${sudo}apt-get install -y --no-install-recommends $missing"
  exit 1
}

format() {
  find allocator kernels protocol daemon client tests -name 'build*' -prune -o -type f \
    \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 >"$logs/format.files" &&
    run xargs -0 -r -n 50 clang-format-14 --dry-run -Werror <"$logs/format.files" \
      2>"$logs/format.errors" && return 0
  echo 'Details are in build/check/format.errors. To reformat:'
  echo "clang-format-14 -i $(sed -n 's/:[0-9]*:[0-9]*: error:.*//p' "$logs/format.errors" | sort -u | tr '\n' ' ')"
  return 1
}

rules() {
  run python3 -m unittest discover -s tests/checks -p 'test_*.py' &&
    run python3 tests/checks/dependencies.py
}

# configure FOLDER OPTIONS...
configure() {
  local folder=$1
  shift
  run cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLARDER_TESTS=ON \
    -DLARDER_WERROR=ON "$@"
}

# build FOLDER OPTIONS...
build() {
  local folder=$1
  shift
  run cmake --build "$folder" -j "$jobs" "$@"
}
configure_and_build() { configure "$@" && build "$1"; }

dead_sources() { run python3 tests/checks/dependencies.py --compile-commands build/compile_commands.json; }
headers() { run cmake --build build -j "$jobs" --target header_checks -- -k 0; }
tidy() { run python3 tests/checks/tidy.py build --jobs "$jobs"; }
install_and_find() { run tests/checks/install_test.sh build; }

tests_labelled() { ctest --test-dir "$1" -N -L "$2" 2>/dev/null | sed -n 's/^Total Tests: //p'; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# ctest_in FOLDER RESULTS_NAME SELECTION...
ctest_in() {
  local folder=$1 results=$logs/results-$2.xml launcher=()
  shift 2
  # ThreadSanitizer of GCC 12 cannot map its shadow where the kernel randomises more bits than it
  # expects; without randomisation it always can.
  if [ "$folder" = build-tsan ] && setarch -R true 2>/dev/null; then launcher=(setarch -R); fi
  run "${launcher[@]}" ctest --test-dir "$folder" -j "$jobs" --timeout 300 --output-on-failure \
    --no-tests=error --output-junit "$results" "$@"
}

# Labels that an ordinary test run leaves out: fuzz and chaos have steps of their own.
left_out() { if has_gpu; then echo '^(fuzz|chaos)$'; else echo '^(fuzz|chaos|gpu)$'; fi; }

test_plain() { ctest_in build plain -LE "$(left_out)"; }

test_asan() {
  export ASAN_OPTIONS=${ASAN_OPTIONS-detect_stack_use_after_return=1:strict_string_checks=1}
  export UBSAN_OPTIONS=${UBSAN_OPTIONS-print_stacktrace=1}
  ctest_in build-asan asan -LE "$(left_out)"
}

test_tsan() {
  export TSAN_OPTIONS=${TSAN_OPTIONS-halt_on_error=1:second_deadlock_stack=1}
  if [ "$(tests_labelled build-tsan '^threads$')" -gt 0 ]; then
    ctest_in build-tsan tsan -L '^threads$' -LE "$(left_out)"
  else
    ctest_in build-tsan tsan -LE "$(left_out)"
  fi
}

# fuzz RESULTS_NAME: the fuzz tests of the asan build.
fuzz() {
  if [ "$(tests_labelled build-asan '^fuzz$')" -eq 0 ]; then
    echo 'NOTE: no test is labelled fuzz'
    return 0
  fi
  ctest_in build-asan "$1" -L '^fuzz$'
}

# chaos RESULTS_NAME ROUNDS: processes killed at random while text is written.
chaos() {
  export LARDER_CHAOS_ROUNDS=$2
  ctest_in build "$1" -L '^chaos$'
}

long_fuzz() {
  export LARDER_FUZZ_SECONDS=${LARDER_FUZZ_SECONDS:-300}
  fuzz long-fuzz --timeout $((LARDER_FUZZ_SECONDS + 300))
}

# simulate EVENTS SEED...: so many events from each seed, $jobs seeds at a time.
simulate() {
  local events=$1 seed failed=0
  shift
  printf '$ %s\n' "build/bin/larder-sim --seed N --events $events, N of: $*"
  # shellcheck disable=SC2016  # for the inner shell
  printf '%s\n' "$@" | xargs -P "$jobs" -I SEED sh -c \
    'build/bin/larder-sim --seed SEED --events "$1" >"$2/simulation-SEED.log" 2>&1' \
    sh "$events" "$logs" || failed=1
  for seed in "$@"; do
    grep -q '^seed .* a second$' "$logs/simulation-$seed.log" || failed=1
    tail -n 3 "$logs/simulation-$seed.log"
  done
  echo "NOTE: $(($# * events)) events, seeds: $*"
  return "$failed"
}
# Three seeds that stay, and one that nobody has looked at.
simulation() { simulate 500000 1 2 3 "$(date +%s)"; }
long_simulation() {
  local first
  first=$(date +%s)
  # shellcheck disable=SC2046  # one word per seed
  simulate 5000000 $(seq "$first" $((first + 19)))
}
mutants() { run python3 tests/simulation/mutants.py --jobs "$jobs"; }

# -------------------------------------------------------------------------------------- the command

# Two architectures stand for all: the oldest, and the one with features of its own.
plain_build() {
  step configure configure build -DLARDER_CUDA=AUTO \
    '-DLARDER_CUDA_ARCHITECTURES=80-real;90a-real' || return
  step sources dead_sources || true
  step build build build
}
# Lightly optimised: at -O2 a sanitized build takes twice as long as its tests.
sanitizer_flags='-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG'
build_asan() {
  configure build-asan -DLARDER_CUDA=OFF -DLARDER_SANITIZE=address "$sanitizer_flags" &&
    build build-asan
}
# Only what has threads of its own: the rest of the tree has one loop thread per process.
build_tsan() {
  configure build-tsan -DLARDER_CUDA=OFF -DLARDER_SANITIZE=thread "$sanitizer_flags" &&
    build build-tsan --target threads_tests
}
asan() { step build-asan build_asan && step test-asan test_asan; }
tsan() { step build-tsan build_tsan && step test-tsan test_tsan; }

fast() {
  step format format || true
  step rules rules || true
  if plain_build; then
    step headers headers || true
    step test test_plain || true
  fi
}

ci() {
  step format format || true
  step rules rules || true
  if plain_build; then
    step headers headers || true
    step tidy tidy || true
    step test test_plain || true
    step chaos chaos chaos 200 || true
    step simulation simulation || true
    step install install_and_find || true
  fi
  if asan; then step fuzz fuzz fuzz || true; fi
  tsan || true
}

# Says how many GPU tests did not run, and why.
gpu_tests() {
  local listed
  listed=$(tests_labelled build '^gpu$')
  gpu_skipped=0
  if [ "${listed:-0}" -eq 0 ]; then
    echo 'GPU tests: 0 skipped (none exist in this build: without nvcc no CUDA kernels were compiled)'
  elif has_gpu; then
    echo "GPU tests: 0 skipped ($listed in the build)"
  else
    gpu_skipped=$listed
    echo "GPU tests: $listed skipped (no GPU: nvidia-smi $(command -v nvidia-smi >/dev/null && echo fails || echo is missing))"
  fi
}

main() {
  local command=${1:-} gpu_skipped=0
  case $command in
    fast | asan | tsan | tidy | ci | all) ;;
    *)
      sed -n '4,10s/^# \{0,5\}//p' "${BASH_SOURCE[0]}"
      exit 2
      ;;
  esac
  mkdir -p "$logs"
  rm -f "$logs"/results-*.xml
  case $command in
    ci | all)
      require_packages install
      step packages packages || exit 1
      use_toolkit
      step toolkit toolkit || exit 1
      ;;
    *) require_packages only ;;
  esac
  use_toolkit
  case $command in
    fast) fast ;;
    asan) asan || true ;;
    tsan) tsan || true ;;
    tidy) if plain_build; then step tidy tidy || true; fi ;;
    ci) ci ;;
    all)
      ci
      step long-fuzz long_fuzz || true
      step long-chaos chaos long-chaos 1000 || true
      if [ -x build/bin/larder-sim ]; then
        step long-simulation long_simulation || true
        step mutants mutants || true
      fi
      ;;
  esac
  case $command in ci | all | fast) gpu_tests ;; esac
  if [ ${#failed_steps[@]} -gt 0 ]; then echo "Failed steps: ${failed_steps[*]}"; fi
  local results=()
  for file in "$logs"/results-*.xml; do if [ -e "$file" ]; then results+=("$file"); fi; done
  python3 tests/checks/results.py --skipped "$gpu_skipped" "${results[@]}"
  [ ${#failed_steps[@]} -eq 0 ]
}

main "$@"
