#!/usr/bin/env python3
"""Makes the tables of kernels/README.md from what kernels_gpu_bench prints.

    kernels_gpu_table.py KERNELS-GPU.json

One table per operation. A cell is the portable row's time, if it is not the only one, the time of the
row that serves the call, and that row's share of the ceiling of the same run: the better copy, bytes
read and written together; for checksum, reading; for host copies, one pinned copy.
"""
import json
import sys

APPEND_ROW = ("format", "encoder", "key_transform", "input", "heads", "dim", "layers", "rope",
              "slot_bits")
LAYOUT = {
    # op: (what a row is, what a column is)
    "append": (APPEND_ROW, ("tokens",)),
    "gather": (("format", "output", "heads", "dim"), ("tokens",)),
    "convert": (("format", "block_tokens", "page_tokens", "page_order"), ("to_pool",)),
    "copy": (("block_bytes",), ("blocks",)),
    "scrub": (("block_bytes",), ("blocks",)),
    "checksum": (("block_bytes",), ("blocks",)),
    "host_to_device": (("block_bytes", "blocks"), ()),
    "device_to_host": (("block_bytes", "blocks"), ()),
}
USUAL = {"encoder": "reference", "key_transform": "none", "input": "bf16", "layers": 1,
         "rope": "none", "slot_bits": 64}


def microseconds(result):
    value = result["us_median"]
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def share(result, ceilings):
    if "share_of_pinned_copy" in result:
        return result["share_of_pinned_copy"]
    if result["op"] != "checksum":
        return result["share_of_copy"]
    best = max(ceilings[when]["read_kernel"] for when in ("before", "after"))
    return result["bytes_read"] / result["us_median"] * 1e6 / best


def cell(results, ceilings):
    if "skipped" in results[0]:
        return "-"
    is_host = "host" in results[0]["op"]
    ours = results[-1] if is_host else results[0]
    if is_host:
        ours = next(r for r in results if r["row"] != "one pinned copy")
    text = f"{microseconds(ours)} ({100 * share(ours, ceilings):.0f} %)"
    if len(results) > 1 and not is_host:
        text = f"{microseconds(results[-1])} -> {text}"
    return text if all(r["checked"] for r in results) else text + " **bytes differ**"


def row_name(op, item):
    if op == "append":
        parts = [item["format"]]
        parts += [str(item[key]) for key in ("encoder", "key_transform")
                  if item.get(key) != USUAL[key]]
        parts += [f"from {item['input']}"] if item.get("input") != "bf16" else []
        parts += [f"{item['heads']} x {item['dim']}"]
        parts += [f"{item['layers']} layers"] if item.get("layers") != 1 else []
        parts += [f"RoPE by {item['rope']}"] if item.get("rope") != "none" else []
        parts += ["int32 slots"] if item.get("slot_bits") == 32 else []
        return ", ".join(parts)
    if op == "gather":
        return f"{item['format']} to {item['output']}, {item['heads']} x {item['dim']}"
    if op == "convert":
        return (f"{item['format']}, blocks of {item['block_tokens']} and "
                f"{item['page_order']} pages of {item['page_tokens']}")
    if "host" in op:
        return f"{item['blocks']} blocks of {item['block_bytes'] // 1024} KiB"
    return f"blocks of {item['block_bytes'] // 1024} KiB"


def column_name(op, key):
    if op == "convert":
        return "to pool" if key == (True,) else "from pool"
    if op in ("append", "gather"):
        return f"{key[0]:,} tokens"
    if op in ("copy", "scrub", "checksum"):
        return "one block" if key == "one" else "256 MiB of blocks"
    return "us"


def table(op, results, ceilings):
    row_keys, column_keys = LAYOUT[op]
    grid, columns = {}, []
    for result in results:
        row = tuple(result.get(key) for key in row_keys)
        column = tuple(result.get(key) for key in column_keys)
        if op in ("copy", "scrub", "checksum"):
            column = "one" if result["blocks"] == 1 else "many"
        if column not in columns:
            columns.append(column)
        grid.setdefault(row, {}).setdefault(column, []).append(result)
    if op != "convert":
        columns.sort(key=lambda c: c if isinstance(c, tuple) else (c == "many",))
    names = [column_name(op, column) for column in columns]
    print(f"\n#### {op}\n\n| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for row in grid.values():
        first = next(iter(row.values()))[0]
        texts = [cell(row[column], ceilings) if column in row else "" for column in columns]
        print(f"| {row_name(op, first)} | {' | '.join(texts)} |")


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        raw = json.load(file)
    conditions, ceilings = raw["conditions"], raw["ceilings"]
    figures = "; ".join(
        f"{what} {ceilings['before'][name] / 1e9:,.0f} GB/s before and "
        f"{ceilings['after'][name] / 1e9:,.0f} after"
        for name, what in (("copy", "copy"), ("read_kernel", "read"),
                           ("to_device", "pinned to device"), ("to_host", "device to pinned")))
    print(f"{conditions['date'][:10]}, {conditions['gpu']}, driver {conditions['driver']}, "
          f"{conditions['replays']} replays. Ceilings: {figures}.")
    for op in LAYOUT:
        results = [result for result in raw["results"] if result["op"] == op]
        if results:
            table(op, results, ceilings)


if __name__ == "__main__":
    main()
