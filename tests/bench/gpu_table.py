#!/usr/bin/env python3
"""Makes the README's table of what pools on a GPU cost from raw figures.

    gpu_table.py GPU.json GPU_UNDER_MPS.json

Both are what gpu_bench prints.
"""
import json
import sys

from survival_table import show

ROWS = (
    ("segment of 256 MiB: create and export", "segments.256_mib.create_and_export"),
    ("the same: import, map, set access", "segments.256_mib.import_map_set_access"),
    ("the same: unmap; close the last fd", "segments.256_mib.unmap", "segments.256_mib.close_fd"),
    ("pool of 100 GiB in 400 segments: open", "large_pool.open_us"),
    ("the same: map in an engine", "large_pool.attach_us"),
    ("the same: exec of larderd to serving", "large_pool.restart_to_serving"),
    ("append of one token, on request, round trip", "on_request.append_one_token"),
    ("kernel, append on request, kernel, ordered by words", "on_request.turn_ordered_by_words"),
    ("append of one token, in process: host time", "in_process.host_per_call"),
    ("the same: GPU time; in a graph", "in_process.gpu_per_call_us",
     "in_process.gpu_per_call_in_a_graph_us"),
    ("append of 32,768 tokens, in process", "owner_check.no_check"),
    ("the same, owners checked in device memory", "owner_check.owners_in_device_memory"),
    ("the same, owners checked in host memory", "owner_check.owners_in_host_memory"),
)


def figure(raw, path):
    for key in path.split("."):
        raw = raw[key]
    return show(raw["p50_us"] if isinstance(raw, dict) else raw)


def main():
    plain, mps = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:3])
    print("| what (medians) | without MPS | under MPS |\n|---|---|---|")
    for what, *paths in ROWS:
        cells = ["; ".join(figure(raw, path) for path in paths) for raw in (plain, mps)]
        print(f"| {what} | {' | '.join(cells)} |")
    mib = [raw["executor"]["footprint_bytes"] / 2**20 for raw in (plain, mps)]
    print(f"| memory of the GPU that the executor takes | {mib[0]:.0f} MiB | {mib[1]:.0f} MiB |")
    conditions = plain["conditions"]
    print(f"\n{conditions['date']}, {conditions['gpu']['name']}, {conditions['cpus']} CPUs "
          f"({conditions['cpu']}).")


if __name__ == "__main__":
    main()
