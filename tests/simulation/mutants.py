#!/usr/bin/env python3
"""Proves that the simulation finds mistakes: makes each of ten on purpose, and must see it found.

    mutants.py [--jobs N] [--seeds N] [--events N] [NAME...]

Each mutant is a few replaced lines in a copy of the sources. What it needs is compiled and
larder-sim is run, seed after seed, until a run fails. A mutant that survives all seeds, and one
whose old text is not found exactly once, makes the exit status 1.
"""
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = "-std=c++20 -O2 -w".split()


class Mutant(NamedTuple):
    name: str
    edits: List[Tuple[str, str, str]]  # file, old text, new text


MUTANTS = [
    Mutant("crc-unchecked", [(
        "allocator/journal.cpp",
        "if (const uint32_t computed = record_crc(header, payload); computed != header.crc)",
        "if (const uint32_t computed = record_crc(header, payload); false)")]),
    Mutant("reply-before-journal", [
        ("allocator/recorded_machine.cpp",
         "  if (const auto record = machine_.record(); !record.empty() && !outside_.append(record))\n"
         "    outside_.checkpoint(snapshot());\n", ""),
        ("allocator/recorded_machine.cpp",
         "  }\n}\n\nstd::span<const std::byte> RecordedMachine::snapshot() {\n",
         "  }\n"
         "  if (const auto record = machine_.record(); !record.empty() && !outside_.append(record))\n"
         "    outside_.checkpoint(snapshot());\n"
         "}\n\nstd::span<const std::byte> RecordedMachine::snapshot() {\n")]),
    Mutant("free-before-fence", [(
        "allocator/pool_blocks_prefixes.cpp",
        "if (fence == FenceClass::kFenced && table.at(id).copies == 0) {",
        "if (table.at(id).copies == 0) {")]),
    Mutant("checkpoint-off-by-one", [
        ("allocator/recorded_machine.h", "  ByteWriter snapshot_;\n",
         "  ByteWriter snapshot_;\n  std::vector<std::byte> before_;\n"),
        ("allocator/recorded_machine.cpp",
         "  Effects effects = machine_.apply(std::move(event), outside_.now_us());\n",
         "  const auto now = snapshot();\n  before_ = {now.begin(), now.end()};\n"
         "  Effects effects = machine_.apply(std::move(event), outside_.now_us());\n"),
        ("allocator/recorded_machine.cpp", "    outside_.checkpoint(snapshot());",
         "    outside_.checkpoint(before_);")]),
    Mutant("deposit-after-journal", [
        ("allocator/recorded_machine.cpp",
         "      Status status = outside_.create_segment(*create);\n"
         "      events_.emplace_back(SegmentCreated{create->segment, std::move(status)});\n",
         "      const CreateSegment later = *create;\n"
         "      events_.emplace_back(SegmentCreated{create->segment, {}});\n"
         "      apply_next();\n"
         "      (void)outside_.create_segment(later).ok();\n")]),
    Mutant("generation-not-bumped", [(
        "allocator/block_table.cpp",
        "if (++freed.generation == 0) freed.generation = 1;", "")]),
    Mutant("hold-lost-on-resume", [(
        "allocator/state_machine_sessions.cpp",
        "  session->second.absent = false;\n",
        "  session->second.absent = false;\n"
        "  for (const PoolId id : session->second.pools)\n"
        "    for (uint32_t g = 0; g < pools_.at(id).blocks.num_groups(); ++g)\n"
        "      for (const int32_t b : pools_.at(id).blocks.group(g).held_by(event.session))\n"
        "        if (pools_.at(id).blocks.group(g).at(b).state == BlockState::kPublished) {\n"
        "          (void)pools_.at(id).blocks.release(event.session, g,\n"
        "              std::vector<BlockRef>{{b, pools_.at(id).blocks.group(g).at(b).generation}},\n"
        "              now_us_).ok();\n"
        "          emit_words(pools_.at(id));\n"
        "          return;\n"
        "        }\n")]),
    Mutant("quota-released-twice", [(
        "allocator/state_machine_extents.cpp",
        "  effects_.emplace_back(DropSegment{segment});\n  ledger_.give_back(tenant, size_bytes);\n",
        "  effects_.emplace_back(DropSegment{segment});\n  ledger_.give_back(tenant, size_bytes);\n"
        "  if (ledger_.at(tenant).used_bytes >= size_bytes) ledger_.give_back(tenant, size_bytes);\n")]),
    Mutant("parent-evicted-first", [
        ("allocator/prefix_index.h",
         "bool evictable_leaf() const { return present && uses == 0 && num_children == 0; }",
         "bool evictable_leaf() const { return present && uses == 0 && num_pinned_children == 0; }"),
        ("allocator/prefix_index.cpp",
         "  if (first.depth != second.depth) return first.depth > second.depth;\n",
         "  if (first.depth != second.depth) return first.depth < second.depth;\n")]),
    Mutant("epoch-ignored", [(
        "daemon/keeper.cpp",
        "(asker.connection != owner_ || request.epoch != epoch_)", "owner_ < 0")]),
]


def sources(folder: Path) -> List[Path]:
    found = sorted(folder.glob("allocator/*.cpp")) + [folder / "daemon/keeper.cpp"]
    return found + [p for p in sorted(folder.glob("tests/simulation/*.cpp"))
                    if not p.name.endswith("_test.cpp")]


def apply(mutant: Mutant, folder: Path) -> None:
    for name, old, new in mutant.edits:
        path = folder / name
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: the old text is {text.count(old)} times in {name}: {old!r}")
        path.write_text(text.replace(old, new))


def build(folder: Path, jobs: int) -> Path:
    """Paths are relative to the folder, so that ccache finds what the mutant has not changed."""
    launcher = ["ccache"] if shutil.which("ccache") else []

    def compile_one(source: Path) -> Path:
        relative = source.relative_to(folder)
        target = Path("objects") / (str(relative).replace("/", "_") + ".o")
        subprocess.run(launcher + ["g++", *FLAGS, "-I.", "-Iallocator/include", "-c", str(relative),
                                   "-o", str(target)], check=True, cwd=folder)
        return target

    (folder / "objects").mkdir()
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources(folder)))
    subprocess.run(["g++", *map(str, objects), "-o", "larder-sim", "-lcrypto"], check=True, cwd=folder)
    return folder / "larder-sim"


def find(program: Path, seeds: int, events: int) -> Tuple[bool, str]:
    """Whether a run failed, and after how many events by what."""
    total = 0
    for seed in range(1, seeds + 1):
        done = subprocess.run([str(program), "--seed", str(seed), "--events", str(events)],
                              capture_output=True, text=True, timeout=600)
        counted = re.search(r"seed \d+: (\d+) events", done.stdout)
        total += int(counted.group(1)) if counted else 0
        if done.returncode != 0:
            failed = re.search(r"FAILED (.*)", done.stdout) or re.search(r"(.*check failed.*)", done.stderr)
            what = failed.group(1) if failed else f"exit status {done.returncode}"
            return True, f"{total} events, seed {seed}: {what}"
    return False, f"survived {total} events"


def copy_sources(folder: Path) -> None:
    for name in ("allocator", "daemon", "protocol", "tests/simulation"):
        shutil.copytree(ROOT / name, folder / name,
                        ignore=shutil.ignore_patterns("build*", "__pycache__"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--events", type=int, default=250_000)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {m.name for m in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    survived = []
    for mutant in MUTANTS:
        if arguments.names and mutant.name not in arguments.names:
            continue
        with tempfile.TemporaryDirectory(prefix="larder-mutant-") as name:
            folder = Path(name)
            copy_sources(folder)
            apply(mutant, folder)
            found, how = find(build(folder, arguments.jobs), arguments.seeds, arguments.events)
        print(f"{'found   ' if found else 'SURVIVED'}  {mutant.name:22} {how}", flush=True)
        if not found:
            survived.append(mutant.name)
    print(f"NOTE: {len(survived)} mutants survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
