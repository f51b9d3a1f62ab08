#!/usr/bin/env bash
# A stranger's build: install BUILD_FOLDER into a prefix of its own, then compile and link a small
# project against it with find_package(larder). The project is the README's C++ example, if README.md
# has a ```cpp block with a main function. Nothing is run.
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
project(stranger LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
find_package(larder REQUIRED)
add_executable(stranger main.cpp)
target_link_libraries(stranger PRIVATE larder::client)
CMAKE

# The first ```cpp block with a main function.
awk '/^```cpp/ { inside = 1; block = ""; next }
     /^```/ { if (inside && block ~ /int main\(/) { printf "%s", block; exit } inside = 0; next }
     inside { block = block $0 "\n" }' "$root/README.md" >"$scratch/project/main.cpp" 2>/dev/null || true
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
