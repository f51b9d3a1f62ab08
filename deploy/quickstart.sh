#!/usr/bin/env bash
# From a bare Debian 12 to text whose KV cache lives in Larder: installs packages, builds, starts the
# three processes, generates in both execution modes, proves where the KV is, kills larderd and the
# executor in mid-sentence without losing a byte, and stops everything.
#
#     deploy/quickstart.sh            # needs root for packages the first time
#
# Nothing is left running or installed outside the build folder but the packages.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
build=$root/build-quickstart
model=$root/tests/data/tiny-lm
prompt='The kernel allocates a page of memory when '

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'quickstart: %s\n' "$*" >&2
  exit 1
}

# ----------------------------------------------------------------------------- packages and build

missing_packages() {
  local package
  for package in $(sed -n '/^# \[build\]/,/^# \[check\]/{/^#/d;/^$/d;p}' deploy/packages.txt); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      printf '%s ' "$package"
  done
}

install_packages() {
  local missing
  missing=$(missing_packages)
  if [ -z "$missing" ]; then return 0; fi
  if [ "$(id -u)" -ne 0 ]; then
    die "packages are missing; as root: apt-get install -y --no-install-recommends $missing"
  fi
  say "Installing $missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086  # one word per package
  apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# What CMake calls this machine's GPUs, "90a-real" for compute capability 9.0; empty: none.
gpu_architectures() {
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
    sed -nE 's/^([0-9]+)\.([0-9]+)$/\1\2/p' | sort -nu |
    sed -E 's/^(9.|1..)$/\1a/; s/$/-real/' | paste -sd ';' -
}

# Also sets $device, larderd's --device.
build_all() {
  say "Building"
  local cuda=(-DLARDER_CUDA=OFF) architectures
  if command -v nvcc >/dev/null; then
    cuda=(-DLARDER_CUDA=ON)
    architectures=$(gpu_architectures)
    if [ -n "$architectures" ]; then cuda+=("-DLARDER_CUDA_ARCHITECTURES=$architectures"); fi
    echo "nvcc is here: building with CUDA${architectures:+ for $architectures}"
    device=auto
  else
    echo "no nvcc here: building without CUDA; pools are on host memory"
    device=host
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLARDER_TESTS=OFF "${cuda[@]}" \
    >"$build.log" 2>&1 || {
    tail -n 40 "$build.log" >&2
    die "the configuration failed; the whole log is $build.log"
  }
  cmake --build "$build" -j "$(nproc)" >>"$build.log" 2>&1 || {
    tail -n 40 "$build.log" >&2
    die "the build failed; the whole log is $build.log"
  }
  rm -f "$build.log"
}

# ------------------------------------------------------------------------------------- processes

run=$(mktemp -d "${TMPDIR:-/tmp}/larder-quickstart.XXXXXX")
pids=()

stop_all() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
  rm -rf "$run"
}
trap stop_all EXIT

# wait_for COMMAND...: until it succeeds, 10 s at most.
wait_for() {
  local tries
  for ((tries = 0; tries < 200; ++tries)); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.05
  done
  cat "$run"/*.log >&2
  die "'$*' did not succeed in 10 s"
}

# larderd_pid: of the one that runs now.
start_larderd() {
  "$build/bin/larderd" --socket "$run/larderd.sock" --keeper "$run/keeper.sock" --http-port 0 \
    --device "$device" --memory-bytes 256MiB 2>>"$run/larderd.log" &
  larderd_pid=$!
  pids=("$larderd_pid" "$keeper_pid") # larderd is stopped before the keeper
}

start_all() {
  say "Starting larder-keeper and larderd, which starts larder-executor"
  "$build/bin/larder-keeper" --socket "$run/keeper.sock" 2>"$run/keeper.log" &
  keeper_pid=$!
  pids=("$keeper_pid")
  wait_for test -S "$run/keeper.sock"
  start_larderd
  export LARDER_SOCKET=$run/larderd.sock
  wait_for is_ready
  "$build/bin/larderctl" status
}

http_port() { sed -n 's/.*event=http_serving .*port=\([0-9]*\).*/\1/p' "$run/larderd.log" | tail -n 1; }

# http_get PATH: the body of a page of larderd's.
http_get() {
  exec 3<>"/dev/tcp/127.0.0.1/$(http_port)"
  printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3
  sed '1,/^\r$/d' <&3
  exec 3<&- 3>&-
}

is_ready() { [ "$(http_get /readyz)" = ok ]; }

# ----------------------------------------------------------------------------------------- the show

# generate NAME OPTIONS...: text to $run/NAME.txt and the screen, the summary to $run/NAME.summary
# and the screen.
generate() {
  local name=$1
  shift
  "$build/bin/larder-generate" --model "$model" --prompt "$prompt" --max-tokens 120 "$@" \
    2>"$run/$name.summary" | tee "$run/$name.txt" || {
    cat "$run/$name.summary" >&2
    die "larder-generate failed"
  }
  cat "$run/$name.summary" >&2
  echo
}

# summary NAME KEY: a figure of the run's summary.
summary() { sed -n "s/.* $2=\([0-9]*\).*/\1/p" "$run/$1.summary"; }

# place NAME KEY: where the run's model (model_on) or pool (pool_on) was.
place() { sed -n "s/.* $2=\"\([^\"]*\)\".*/\1/p" "$run/$1.summary"; }

# same_text NAME OTHER: two runs made one text. Where a model's products were computed on a GPU once
# and on the CPU once, the text may go another way where two bytes are equally likely.
same_text() {
  if cmp -s "$run/$1.txt" "$run/$2.txt"; then
    echo "The two texts are the same, byte for byte."
  elif [ "$(place "$1" model_on)" = "$(place "$2" model_on)" ]; then
    die "the texts differ: $1, $2"
  else
    echo "The texts part where rounding decides: the model ran on $(place "$1" model_on) and on" \
      "$(place "$2" model_on)."
  fi
}

executor_pid() {
  "$build/bin/larderctl" --format json status | sed -n 's/.*"executor_pid": \([0-9]*\).*/\1/p'
}

# another_executor_than PID: one is there.
another_executor_than() {
  local now
  now=$(executor_pid)
  [ "$now" != "$1" ] && [ "$now" != 0 ]
}

# has_bytes FILE COUNT
has_bytes() { [ "$(stat -c %s "$1" 2>/dev/null || echo 0)" -ge "$2" ]; }

kill_larderd() {
  local old=$larderd_pid
  kill -KILL "$old"
  { wait "$old"; } 2>/dev/null || true
  start_larderd
  printf '\n  [kill -9 %s, which was larderd; the next one is %s]\n' "$old" "$larderd_pid"
}

kill_executor() {
  local old
  old=$(executor_pid)
  kill -KILL "$old"
  wait_for another_executor_than "$old"
  printf '\n  [kill -9 %s, which was larder-executor; the next one is %s]\n' "$old" "$(executor_pid)"
}

# checksums NAME: block id and checksum of each published block of the text, to $run/NAME.sums.
checksums() {
  "$build/bin/larder-generate" --model "$model" --pool demo --checksum \
    --prompt "$(cat "$run/published.txt")" >"$run/$1.sums" 2>"$run/$1.summary"
}

# survive EXECUTION: the text again, while processes are killed.
survive() {
  local name=survived-$1 bytes=${#prompt} writer
  say "The text once more, $1, with 20 ms between tokens. larderd is killed twice, the executor once"
  : >"$run/$name.txt"
  generate "$name" --execution "$1" --pool demo --no-prefix --pause-ms 20 &
  writer=$!
  wait_for has_bytes "$run/$name.txt" $((bytes + 20))
  kill_larderd
  wait_for has_bytes "$run/$name.txt" $((bytes + 50))
  kill_executor
  wait_for has_bytes "$run/$name.txt" $((bytes + 80))
  kill_larderd
  wait "$writer" || die "the engine did not live through it"
  cmp "$run/$1.txt" "$run/$name.txt" || die "the texts differ"
  [ "$(summary "$name" appended_tokens)" = "$(summary "$1" appended_tokens)" ] ||
    die "tokens were computed again"
  echo "Byte for byte the undisturbed text, and $(summary "$name" appended_tokens) tokens appended," \
    "as there. Longest stall between two tokens: $(summary "$name" longest_stall_ms) ms."
}

show_survival() {
  local lost
  checksums before
  survive in-process
  survive on-request
  checksums after
  lost=$(grep -Fvxc -f "$run/after.sums" "$run/before.sums" || true)
  say "The published blocks, by id"
  printf 'before: %s\n' "$(cut -d' ' -f1 "$run/before.sums" | tr '\n' ' ')"
  printf 'after:  %s\n' "$(cut -d' ' -f1 "$run/after.sums" | tr '\n' ' ')"
  echo "$(summary before bytes) bytes in $(summary before blocks) blocks; lost bytes:" \
    "$((lost * $(summary before bytes) / $(summary before blocks)))"
  [ "$lost" -eq 0 ] || die "blocks differ"
}

show() {
  say "Text with an nvfp4 pool, kernels in the engine's own process"
  generate in-process --execution in-process --pool demo --no-prefix
  echo "The pool is memory of $(place in-process pool_on); the model ran on $(place in-process model_on)."
  say "The same pool, kernels run by the daemon's executor on request"
  generate on-request --execution on-request --pool demo --no-prefix
  same_text in-process on-request

  say "Where is the KV cache? A second connection changes one byte of the pool after the prefill"
  generate poked --execution on-request --pool demo --poke --no-stream
  if cmp -s "$run/on-request.txt" "$run/poked.txt"; then die "the poke changed nothing"; fi
  echo "The text changed: the keys and values are in the pool, not in the engine."

  say "A second engine finds the first one's prefix"
  generate published --execution in-process --pool demo >/dev/null
  generate reused --execution on-request --pool demo >/dev/null
  same_text published reused

  say "larderctl pools"
  "$build/bin/larderctl" pools
  say "/metrics, the lines about tokens and blocks"
  http_get /metrics | grep -E '^larder_(appended_tokens_total|attended_rows_total|pool_blocks)'
}

started=$SECONDS
install_packages
build_all
start_all
show
show_survival
say "Stopping everything"
stop_all
echo "Done in $((SECONDS - started)) s. Next: tests/check.sh ci, and the example in README.md."
