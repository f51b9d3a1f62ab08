#!/usr/bin/env python3
"""Makes the README's table of what survival costs from raw figures.

    survival_table.py SURVIVAL.json [JOURNAL.json]

SURVIVAL.json is what survival_bench prints, JOURNAL.json what
`journal_bench --benchmark_format=json` prints.
"""
import json
import sys


def show(us):
    """A time as a reader wants it."""
    if us < 1:
        return f"{us * 1000:.0f} ns"
    if us < 1000:
        return f"{us:.3g} us"
    return f"{us / 1000:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def row(what, figures):
    cells = [show(figures[key]) for key in ("min_us", "p50_us", "p99_us")]
    return f"| {what} | {' | '.join(cells)} |"


def operations(figures, names):
    return [row(f"{name}, {figures['batch']} at a time" if figures["batch"] > 1 else name,
                figures[key]) for key, name in names]


def journal_rows(journal):
    rows = []
    for entry in journal["benchmarks"]:
        name, *arguments = entry["name"].split("/")
        if name == "bench_append_warm":
            time_us = entry["cpu_time"] / {"ns": 1e3, "us": 1, "ms": 1e-3}[entry["time_unit"]]
            rows.append(f"| journal, one record of {arguments[0]} bytes (CPU time) | "
                        f"| {show(time_us)} | |")
    return rows


def table(survival, journal=None):
    restart = survival["restart"]
    lines = ["| what | best | median | p99 |", "|---|---|---|---|",
             row(f"exec of larderd to ready, {restart['blocks']:,} blocks in "
                 f"{restart['segments']:,} segments", restart),
             row("the same, nothing there", survival["restart_empty"]),
             row("SIGKILL of an engine to its blocks in another's hands, in process",
                 survival["fence_in_process"]),
             row("the same, on request", survival["fence_on_request"])]
    names = [("allocate", "allocate"), ("publish", "publish"), ("release", "release"),
             ("all", "allocate, publish, release")]
    lines += operations(survival["one_block"], names)
    lines += operations(survival["batch"], names)
    without = survival["batch_without_publish"]
    lines += operations(without, [("all", "allocate, release")])
    lines += journal_rows(journal) if journal else []
    conditions = survival["conditions"]
    lines += ["", f"allocate and release, {without['batch']} at a time: "
              f"{without['blocks_per_s'] / 1e6:.2f} million blocks/s; with publish "
              f"{survival['batch']['blocks_per_s'] / 1e6:.2f}. "
              f"{conditions['date']}, {conditions['cpu']}, {conditions['cpus']} CPUs, load "
              f"{conditions['load_1min']:.1f} to {conditions['load_1min_after']:.1f}."]
    return "\n".join(lines)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    raw = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            raw.append(json.load(file))
    print(table(*raw))


if __name__ == "__main__":
    main()
