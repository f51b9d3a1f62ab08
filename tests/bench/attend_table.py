#!/usr/bin/env python3
"""Makes the tables of attention in kernels/cuda/README.md from what kernels_gpu_bench attend prints.

    attend_table.py ATTEND.json

The file may hold what attend_peer.py added. Shares are of the kernel that only reads, in the same run
and the same state. Ratios divide the times of the sustained state where there is one.
"""
import json
import sys

STATES = ("sustained", "burst")
# (what the ratio says, label of the numerator, label of the denominator)
BASE = "attend nvfp4 32/8 d128 b16"
RATIOS = (
    ("bf16 over nvfp4, both ours", "attend bf16 32/8 d128 b16 32x8K", f"{BASE} 32x8K"),
    ("fp16 over nvfp4, both ours", "attend fp16 32/8 d128 b16 32x8K", f"{BASE} 32x8K"),
    ("fp8_e4m3 over nvfp4, both ours", "attend fp8_e4m3 32/8 d128 b16 32x8K", f"{BASE} 32x8K"),
    ("blocks of 64 over blocks of 16", "attend nvfp4 32/8 d128 b64 32x8K", f"{BASE} 32x8K"),
    ("a window of 1,024 in 32K over a context of 1K", f"{BASE} 8x32K window 1024", f"{BASE} 8x1K"),
    ("4 query tokens over 1", f"{BASE} 32x8K q4", f"{BASE} 32x8K"),
    ("a shared prefix ignored over given", f"{BASE} 64x9K prefix 8K ignored",
     f"{BASE} 64x9K prefix 8K given"),
    ("a shared prefix ignored over found", f"{BASE} 64x9K prefix 8K ignored",
     f"{BASE} 64x9K prefix 8K found"),
    ("centred and rotated keys over plain", f"{BASE} 32x8K centred_rotated", f"{BASE} 32x8K"),
    ("centred and rotated keys over plain", f"{BASE} 256x1K centred_rotated", f"{BASE} 256x1K"),
    ("planned alone over with 31 others", f"{BASE} 32x8K alone", f"{BASE} 32x8K"),
    ("planned alone over with 31 others", f"{BASE} 8x8K alone", f"{BASE} 8x8K"),
    ("planned alone over with 31 others", f"{BASE} 1x8K alone", f"{BASE} 1x8K"),
    ("planned alone over with 31 others", f"{BASE} 1x1K alone", f"{BASE} 1x1K"),
    ("planned alone over with 31 others, prefix given", f"{BASE} 64x9K prefix 8K given alone",
     f"{BASE} 64x9K prefix 8K given"),
    ("planned alone over with 31 others, prefix found", f"{BASE} 64x9K prefix 8K found alone",
     f"{BASE} 64x9K prefix 8K found"),
    ("deterministic over not", f"{BASE} 32x8K deterministic", f"{BASE} 32x8K"),
    ("deterministic over not", f"{BASE} 1x128K deterministic", f"{BASE} 1x128K"),
    ("deterministic over not", f"{BASE} 8x8K deterministic", f"{BASE} 8x8K"),
)


def microseconds(value):
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def cells(result):
    texts = []
    for state in STATES:
        figures = result.get(state)
        if figures is None:
            texts += [""] * 3
            continue
        share = figures.get("share_of_read")
        texts += [microseconds(figures["us"]), f"{figures['bytes_per_second'] * 1e-12:.2f}",
                  "" if share is None else f"{100 * share:.0f} %"]
    return texts


def clocks(result):
    """Lowest and highest SM clock and power while a result was measured under load."""
    figures = result.get("sustained", {})
    devices = [part["device"] for part in figures.get("rounds", [figures]) if "device" in part]
    texts = []
    for key, form in (("sm_mhz", "{:.0f}"), ("watts", "{:.0f}")):
        values = sorted(device[key] for device in devices if device.get(key) is not None)
        span = [form.format(value) for value in values[:1] + values[-1:]]
        texts.append("-".join(dict.fromkeys(span)))
    return " / ".join(texts) if all(texts) else ""


def row_line(result, name):
    if "skipped" in result:
        return f"| {name} |{' - |' * 8} {result['skipped']} |"
    texts = cells(result) + [clocks(result), f"{result['rel_l2']:.1e}"
                             if result.get("rel_l2") is not None else "NaN"]
    if not result["checked"]:
        texts[-1] += " **wrong**"
    return f"| {name} | {' | '.join(texts)} |"


def print_table(lines):
    columns = [f"{what}, {state}" for state in STATES for what in ("us", "TB/s", "of read")]
    columns += ["MHz / W", "rel-L2"]
    print(f"\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for line in lines:
        print(line)


def is_wanted(result):
    """Of a run with several rows, the first (most specific) is the one of the ratios."""
    return result["op"] == "attend" and "skipped" not in result


def first_by_label(results):
    found = {}
    for result in results:
        if is_wanted(result):
            found.setdefault(result["label"], result)
    return found


def ratio_text(above, below, state):
    if state not in above or state not in below:
        return ""
    return f"{above[state]['us'] / below[state]['us']:.2f}"


def ratio_lines(ours, peers):
    best = {}  # the better layout, by the state that is compared
    for peer in peers:
        for state in STATES:
            if state in peer:
                key = (peer["shape"], state)
                if key not in best or peer[state]["us"] < best[key][state]["us"]:
                    best[key] = peer
    for shape in dict.fromkeys(peer["shape"] for peer in peers):
        result = ours.get(f"{BASE} {shape}")
        if result is not None:
            texts = [ratio_text(best[shape, state], result, state) if (shape, state) in best
                     else "" for state in STATES]
            yield f"cuDNN bf16 over nvfp4, {shape}", texts
    for what, above, below in RATIOS:
        if above in ours and below in ours:
            name = f"{what}, {ours[above]['shape']}"
            yield name, [ratio_text(ours[above], ours[below], state) for state in STATES]


def ceiling_text(results):
    reads = [result for result in results if result["op"] == "attend_read"]
    texts = []
    for state in STATES:
        rates = [result[state]["bytes_per_second"] * 1e-12 for result in reads if state in result]
        if rates:
            texts.append(f"{state} {max(rates):.3f} TB/s")
    return ", ".join(texts)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        raw = json.load(file)
    conditions, results = raw["conditions"], raw["results"]
    peers = raw.get("peers", {"results": []})
    print(f"{conditions['date'][:10]}, {conditions['gpu']}, driver {conditions['driver']}, "
          f"{conditions['replays']} replays. Reading alone: {ceiling_text(results)}.")
    if peers["results"]:
        print(f"cuDNN {peers['cudnn']} through PyTorch {peers['torch']}, contiguous bf16.")
    shown = [result for result in results if result["op"] == "attend"]
    rows = {result["row"] for result in shown if "row" in result}
    lines = []
    for result in shown:
        name = result["label"].removeprefix("attend ")
        if len(rows) > 1 and "row" in result:
            name += f" ({result['row']})"
        lines.append(row_line(result, name))
    lines += [row_line(peer, peer["label"].removeprefix("peer ")) for peer in peers["results"]]
    print_table(lines)
    print(f"\n| ratio of times | {' | '.join(STATES)} |\n|---|---|---|")
    for name, texts in ratio_lines(first_by_label(shown), peers["results"]):
        print(f"| {name} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
