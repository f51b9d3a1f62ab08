#!/usr/bin/env python3
"""House rules that a compiler does not check: who may include whom, and what a file looks like.

    dependencies.py [--root DIR] [--compile-commands FILE]

Each rule is one function over the tree (path -> text) that yields one line per breach. The exit
status is 1 if any rule is broken. With --compile-commands it also finds sources that no target
compiles.
"""
import argparse
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Dict, Iterator, List, Optional

Tree = Dict[str, str]  # path relative to the root, with '/', -> text

# allocator knows bytes, fds and block ids; kernels knows dtypes, shapes and strides; protocol knows
# messages. Only daemon and client may know two of them. Nothing depends on daemon.
MAY_INCLUDE = {
    "allocator": {"allocator"},
    "kernels": {"kernels"},
    "protocol": {"protocol"},
    "daemon": {"daemon", "client", "allocator", "kernels", "protocol"},
    "client": {"client", "allocator", "kernels", "protocol"},
    "tests": {"tests", "allocator", "kernels", "protocol", "daemon", "client"},
}
# The vocabulary that every folder speaks. It lives in allocator/include/larder.
SHARED_WORDS = {"larder/status.h", "larder/check.h", "larder/own_fd.h", "larder/system_error.h"}

MAX_LINES = 400
CPP = (".h", ".hpp", ".c", ".cpp", ".cc", ".cu", ".cuh")
HEADERS = (".h", ".hpp", ".cuh")
SOURCES = CPP + (".py", ".sh", ".capnp")

# The C++ library has no dot or slash in its names; these few C and POSIX ones carry types that
# public headers need.
STANDARD_HEADER = re.compile(r"[a-z_0-9]+|std(int|def|bool)\.h|unistd\.h|sys/types\.h")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
# One letter of each word stands in brackets so that this file does not break its own rules.
LEFT_OVER = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b|not implemente[d]|placeholde[r]|\bstu[b]\b")
SLEEP = re.compile(r"\bsleep_fo[r]\b|\bsleep_unti[l]\b|\busleep[(]|^\s*sleep [0-9]")
MACHINE_PATH = re.compile(r"(?<![\w.$}-])/(work|root|home/[a-z]\w*|Users/\w+)/")


def folder_of(path: str) -> str:
    return PurePosixPath(path).parts[0] if "/" in path else ""


def folder_of_include(tree: Tree, includer: str, name: str) -> Optional[str]:
    """The folder that the included file belongs to; None if it is no file of ours."""
    if name.startswith("larder/"):
        owners = [f for f in MAY_INCLUDE if f"{f}/include/{name}" in tree]
        return owners[0] if owners else None
    beside = (PurePosixPath(includer).parent / name).as_posix()
    for candidate in (name, beside):
        if candidate in tree or candidate.removesuffix(".h") in tree:  # x.capnp.h of x.capnp
            return folder_of(candidate)
    generated = [p for p in tree if p.endswith("/" + name.removesuffix(".h"))]
    return folder_of(generated[0]) if name.endswith(".capnp.h") and generated else None


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def files(tree: Tree, suffixes, folders=tuple(MAY_INCLUDE)) -> Iterator[str]:
    return (p for p in sorted(tree) if p.endswith(suffixes) and folder_of(p) in folders)


def dependency_direction(tree: Tree) -> Iterator[str]:
    for path in files(tree, CPP):
        folder = folder_of(path)
        for match in INCLUDE.finditer(tree[path]):
            quote, name = match.groups()
            where = f"{path}:{line_of(tree[path], match.start())}"
            ours = folder_of_include(tree, path, name)
            if name in SHARED_WORDS:
                continue
            if ours is None:
                if quote == '"' or name.startswith("larder/"):
                    yield f'{where}: "{name}" is no file of ours; write folder/file.h or larder/file.h'
            elif ours not in MAY_INCLUDE[folder]:
                yield f'{where}: {folder} may not include "{name}", which belongs to {ours}'


def public_headers_stand_alone(tree: Tree) -> Iterator[str]:
    """An installed header finds only larder/... and the standard library beside it."""
    for path in files(tree, HEADERS):
        if not re.match(r"[a-z]+/include/larder/", path):
            continue
        for match in INCLUDE.finditer(tree[path]):
            quote, name = match.groups()
            if not (name.startswith("larder/") if quote == '"' else STANDARD_HEADER.fullmatch(name)):
                where = f"{path}:{line_of(tree[path], match.start())}"
                yield f"{where}: public headers may include only larder/... and the standard library: {name}"


def header_form(tree: Tree) -> Iterator[str]:
    for path in files(tree, HEADERS):
        if not tree[path].startswith("//"):
            yield f"{path}:1: a header starts with a // paragraph: what it is and is not"
        # Highway compiles x-inl.h once per instruction set; such a header has a guard that toggles.
        toggles = path.endswith("-inl.h") and "HWY_TARGET_TOGGLE" in tree[path]
        if not toggles and not re.search(r"^#pragma once$", tree[path], re.MULTILINE):
            yield f"{path}:1: no #pragma once"


def file_length(tree: Tree) -> Iterator[str]:
    for path in sorted(p for p in tree if p.endswith(SOURCES)):
        lines = tree[path].count("\n")
        if lines > MAX_LINES:
            yield f"{path}: {lines} lines; split it where the seam is natural (limit {MAX_LINES})"


def matching_lines(tree: Tree, pattern: "re.Pattern", paths, message: str) -> Iterator[str]:
    for path in paths:
        for number, line in enumerate(tree[path].splitlines(), 1):
            found = pattern.search(line)
            if found:
                yield f"{path}:{number}: {message}: {found.group(0).strip()}"


def no_left_overs(tree: Tree) -> Iterator[str]:
    return matching_lines(tree, LEFT_OVER, sorted(tree), "finish it, or make it a typed UNSUPPORTED")


def no_sleep_in_tests(tree: Tree) -> Iterator[str]:
    # A benchmark may let the machine cool down.
    paths = (p for p in files(tree, SOURCES, ("tests",)) if not p.startswith("tests/bench/"))
    return matching_lines(tree, SLEEP, paths, "tests do not wait on a clock")


def no_machine_paths(tree: Tree) -> Iterator[str]:
    return matching_lines(tree, MACHINE_PATH, sorted(tree), "a path of somebody's machine")


RULES = (dependency_direction, public_headers_stand_alone, header_form, file_length, no_left_overs,
         no_sleep_in_tests, no_machine_paths)


def dead_sources(tree: Tree, compiled: List[str]) -> Iterator[str]:
    """compiled: paths relative to the root that the build compiles. X_absent.cpp stands in for X
    where a build lacks what that needs."""
    for path in files(tree, (".c", ".cpp", ".cc")):
        if path.endswith("_absent.cpp"):
            continue
        if path not in compiled:
            yield f"{path}: no target compiles it"


def compiled_sources(root: Path, compile_commands: Path) -> List[str]:
    entries = json.loads(compile_commands.read_text())
    paths = (os.path.realpath(os.path.join(e["directory"], e["file"])) for e in entries)
    return [os.path.relpath(p, root).replace(os.sep, "/") for p in paths]


def read_tree(root: Path) -> Tree:
    """All text files but build folders, hidden folders (not .ci), test data and the license."""
    tree: Tree = {}
    for directory, folders, names in os.walk(root):
        here = Path(directory).relative_to(root).as_posix()
        folders[:] = [f for f in folders
                      if not (f.startswith(("build", "__pycache__")) or f.endswith(".egg-info")
                              or (f.startswith(".") and f != ".ci") or f"{here}/{f}" == "tests/data")]
        for name in names:
            path = name if here == "." else f"{here}/{name}"
            if path in ("LICENSE", "compile_commands.json") or os.path.islink(root / path):
                continue
            try:
                tree[path] = (root / path).read_text(encoding="utf-8")
            except (UnicodeDecodeError, FileNotFoundError):
                continue  # binary, or a file that an editor has just renamed
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--compile-commands", type=Path)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    tree = read_tree(root)
    broken = [line for rule in RULES for line in rule(tree)]
    if arguments.compile_commands:
        broken += dead_sources(tree, compiled_sources(root, arguments.compile_commands))
    print("\n".join(broken) if broken else f"{len(tree)} files keep the rules")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
