#!/usr/bin/env python3
"""Runs clang-tidy on our sources and remembers, by content, which were clean.

    tidy.py BUILD_FOLDER [--jobs N] [PATH_PREFIX...]

A source is skipped if it was clean before with the same command, .clang-tidy, clang-tidy and bytes
of every file that it includes (the build's own dependency log names them, so build first). The
memory is $XDG_CACHE_HOME/larder-tidy: one empty file for each clean result. PATH_PREFIX, relative to
the root, narrows the run.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Set

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("allocator", "kernels", "protocol", "daemon", "client", "tests")
CLANG_TIDY = os.environ.get("CLANG_TIDY", "clang-tidy-14")
DIAGNOSTIC = re.compile(r".*:\d+:\d+: (error|warning): ")
KEEP_SECONDS = 30 * 24 * 3600


@functools.lru_cache(maxsize=None)
def digest_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def dependencies_by_object(build: Path) -> Dict[str, List[str]]:
    """Object -> files that it was compiled from. Objects that are out of date are left out."""
    log = subprocess.run(["ninja", "-C", str(build), "-t", "deps"], check=True, text=True,
                         stdout=subprocess.PIPE).stdout
    found: Dict[str, List[str]] = {}
    for paragraph in log.split("\n\n"):
        lines = paragraph.strip().split("\n")
        head = lines[0].split(": ", 1)
        if len(head) == 2 and head[1].endswith("(VALID)"):
            found[head[0]] = [os.path.join(build, line.strip()) for line in lines[1:]]
    return found


class Source:
    def __init__(self, entry: dict, build: Path, dependencies: Dict[str, List[str]]):
        self.path = os.path.realpath(os.path.join(entry["directory"], entry["file"]))
        self.name = os.path.relpath(self.path, ROOT)
        self.command = entry["command"]
        self.build = build
        words = self.command.split()
        self.dependencies = dependencies.get(words[words.index("-o") + 1], [])

    def key(self, version: str) -> str:
        """Empty if the dependencies are not known."""
        if not self.dependencies:
            return ""
        parts = [version, self.command, digest_of(str(Path(__file__).resolve())),
                 digest_of(self.path)]
        folder = Path(self.path).parent
        parts += [digest_of(str(f / ".clang-tidy")) for f in [folder, *folder.parents]
                  if (f / ".clang-tidy").is_file()]
        parts += [name + digest_of(name) for name in sorted(self.dependencies)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def check(self) -> subprocess.CompletedProcess:
        # GCC's flags are in the command; what clang alone would warn about is not asked for here.
        return subprocess.run(
            [CLANG_TIDY, "-p", str(self.build / "tidy"), "--quiet", "--extra-arg=-Wno-everything",
             f"--header-filter=^{ROOT}/({'|'.join(FOLDERS)})/", self.path],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def news(output: str, told: Set[str]) -> str:
    """The diagnostics that are not in told yet (a header's come with every source), and adds them."""
    kept, fresh = [], True
    for line in output.replace(f"{ROOT}/", "").splitlines():
        if DIAGNOSTIC.match(line):
            fresh = line not in told
            told.add(line)
        if fresh and not line.endswith(" generated."):
            kept.append(line)
    return "\n".join(kept)


def without_precompiled_headers(build: Path) -> List[dict]:
    """The compile commands as clang can use them: GCC's precompiled headers are nothing to it, and
    without them each source shows whether it includes what it uses. Written to build/tidy."""
    entries = json.loads((build / "compile_commands.json").read_text())
    for entry in entries:
        entry["command"] = re.sub(r" -fpch-preprocess\b| -Winvalid-pch\b| -include \S*cmake_pch\S*",
                                  "", entry["command"])
    entries = [entry for entry in entries if "cmake_pch" not in entry["file"]]
    (build / "tidy").mkdir(exist_ok=True)
    (build / "tidy" / "compile_commands.json").write_text(json.dumps(entries))
    return entries


def our_sources(build: Path) -> List[Source]:
    dependencies = dependencies_by_object(build)
    entries = without_precompiled_headers(build)
    sources = {}
    for entry in entries:
        # clang 14 cannot read the headers of CUDA 13; nvcc's own warnings are errors in them.
        if entry["file"].endswith(".cu"):
            continue
        source = Source(entry, build, dependencies)
        if source.name.split(os.sep)[0] in FOLDERS:
            sources.setdefault(source.name, source)
    return [sources[name] for name in sorted(sources)]


def clean_results() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "larder-tidy"
    cache.mkdir(parents=True, exist_ok=True)
    for entry in cache.iterdir():
        if entry.stat().st_mtime < time.time() - KEEP_SECONDS:
            entry.unlink(missing_ok=True)
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("prefixes", nargs="*", default=[""])
    arguments = parser.parse_args()
    version = subprocess.run([CLANG_TIDY, "--version"], check=True, text=True,
                             stdout=subprocess.PIPE).stdout
    cache = clean_results()
    sources = [s for s in our_sources(arguments.build.resolve())
               if s.name.startswith(tuple(arguments.prefixes))]
    keys = {source.name: source.key(version) for source in sources}
    wanted = [s for s in sources if not keys[s.name] or not (cache / keys[s.name]).exists()]
    unclean, told = 0, set()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for source, result in zip(wanted, pool.map(Source.check, wanted)):
            if result.returncode != 0:
                unclean += 1
                print(f"{source.name}:\n{news(result.stdout, told)}")
            elif keys[source.name]:
                (cache / keys[source.name]).touch()
    print(f"{len(sources)} sources, {len(wanted)} checked, {unclean} with warnings")
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
