#!/usr/bin/env bash
# A stranger's build: install BUILD_FOLDER into a prefix of its own, then compile and link a small
# project against it with find_package(larder). The project is the README's C++ example, if README.md
# has a ```cpp block with a main function; it is not run. Then the C program of client/README.md, as
# C99 with pkg-config and with find_package, which is run where no daemon is and has to say so.
#
#     install_test.sh BUILD_FOLDER
set -euo pipefail

build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log" ||
  { cat "$scratch/install.log"; exit 1; }

mkdir "$scratch/project"
cat >"$scratch/project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(stranger LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
find_package(larder REQUIRED)
add_executable(stranger main.cpp)
target_link_libraries(stranger PRIVATE larder::client)
add_executable(stranger_c main.c)
set_target_properties(stranger_c PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF)
target_link_libraries(stranger_c PRIVATE larder::c)
CMAKE

# example LANGUAGE FILE: the first ```LANGUAGE block of FILE that has a main function.
example() {
  awk -v fence="^\`\`\`$1\$" '$0 ~ fence { inside = 1; block = ""; next }
       /^```/ { if (inside && block ~ /int main\(/) { printf "%s", block; exit } inside = 0; next }
       inside { block = block $0 "\n" }' "$2"
}

example cpp "$root/README.md" >"$scratch/project/main.cpp" 2>/dev/null || true
example c "$root/client/README.md" >"$scratch/project/main.c"
if [ -s "$scratch/project/main.cpp" ]; then
  echo "program: the README's example"
else
  echo "program: a connect (README.md has no C++ example with a main function)"
  cat >"$scratch/project/main.cpp" <<'CPP'
#include <larder/client.h>

int main() { return larder::Client::connect({.socket_path = "/run/larder/larderd.sock"}).ok() ? 0 : 1; }
CPP
fi

cmake -S "$scratch/project" -B "$scratch/project/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/prefix"
cmake --build "$scratch/project/build" --verbose
test -x "$scratch/project/build/stranger"

# says_unavailable PROGRAM: it runs, and reports a code and a sentence.
says_unavailable() {
  local said
  said=$(LARDER_SOCKET=$scratch/none.sock "$1") && { echo "$1 connected to nothing"; return 1; }
  echo "$1: $said"
  [[ $said == UNAVAILABLE:*none.sock* ]]
}
says_unavailable "$scratch/project/build/stranger_c"

library_folder=$(dirname "$(find "$scratch/prefix" -name liblarder.so)")
export PKG_CONFIG_PATH=$library_folder/pkgconfig
test "$(pkg-config --modversion larder)" = "$(sed -n 's/^project(larder VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")"
# shellcheck disable=SC2046  # one word per flag
cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$scratch/project/main.c" -o "$scratch/project/plain_c" \
  $(pkg-config --cflags --libs larder)
LD_LIBRARY_PATH=$library_folder says_unavailable "$scratch/project/plain_c"
