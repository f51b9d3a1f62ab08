#!/usr/bin/env python3
"""Times decode attention of PyTorch (cuDNN, bf16) beside what kernels_gpu_bench measured.

    attend_peer.py ATTEND.json [--seconds S] [--state sustained|burst|both] [--replays N]

ATTEND.json is the output of `kernels_gpu_bench attend` on the same GPU, just before: its reading
kernel is the ceiling here too. The results are put into the file, under "peers". scaled_dot_product_
attention with its cuDNN backend and enable_gqa, K and V contiguous as [batch, heads, tokens, dim] and
as [batch, tokens, heads, dim] (not paged, so that it is at its best), in CUDA graphs over more than
400 MB of K and V, in the two states of gpu_states.h. Without PyTorch or a GPU nothing is written.
"""
import argparse
import json
import statistics
import sys
import time

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = ((32, 8192), (8, 32768), (64, 8192), (256, 4096))  # sequences, tokens
LAYOUTS = ("BHSD", "BSHD")
PAUSE_S = 1.0
BURST_MS = 20.0
MAX_RELATIVE_L2 = 5e-3  # of results in bf16


def calls_per_graph(kv_bytes, sets):
    """As in kernels_gpu_attend.cpp: 24 or more, 8 of the largest, each set equally often."""
    least = max(8 if kv_bytes > 1e9 else 24, int(1000 / (5 + kv_bytes / 4e6)) + 1)
    return -(-least // sets) * sets


class Call:
    """One shape in one layout: its tensors, and a graph of calls."""

    def __init__(self, torch, sequences, tokens, layout):
        self.torch = torch
        make = dict(device="cuda", dtype=torch.bfloat16)
        self.kv_bytes = 2 * sequences * tokens * KV_HEADS * DIM * 2
        self.sets = max(int(400e6 // self.kv_bytes) + 1, 2)
        self.calls = calls_per_graph(self.kv_bytes, self.sets)
        shape = ((sequences, KV_HEADS, tokens, DIM) if layout == "BHSD" else
                 (sequences, tokens, KV_HEADS, DIM))
        order = (0, 1, 2, 3) if layout == "BHSD" else (0, 2, 1, 3)
        self.k = [torch.randn(shape, **make).permute(order) for _ in range(self.sets)]
        self.v = [torch.randn(shape, **make).permute(order) for _ in range(self.sets)]
        self.q = [torch.randn((sequences, HEADS, 1, DIM), **make) for _ in range(self.sets)]
        self.out = [None] * self.sets
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.attend(0)
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for i in range(self.calls):
                self.out[i % self.sets] = self.attend(i % self.sets)

    def attend(self, i):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.torch.nn.functional.scaled_dot_product_attention(
                self.q[i], self.k[i], self.v[i], enable_gqa=True)

    def relative_l2(self):
        """Of a replayed graph's results, first and last sequence, against float64."""
        torch = self.torch
        for out in self.out:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        torch.cuda.synchronize()
        error = norm = 0.0
        for i, sequence in ((0, 0), (self.sets - 1, -1)):
            q = self.q[i][sequence].double().reshape(KV_HEADS, HEADS // KV_HEADS, DIM)
            k, v = self.k[i][sequence].double(), self.v[i][sequence].double()
            weights = torch.softmax(q @ k.transpose(1, 2) / DIM**0.5, dim=-1)
            expected = (weights @ v).reshape(HEADS, 1, DIM)
            error += (self.out[i][sequence].double() - expected).square().sum().item()
            norm += expected.square().sum().item()
        return (error / norm)**0.5

    def timed(self, replays):
        """Microseconds of a call in each of so many replays without a gap, and the GPU meanwhile."""
        torch = self.torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        with torch.cuda.stream(self.stream):
            events[0].record()
            for event in events[1:]:
                self.graph.replay()
                event.record()
            device = device_state(torch)
            events[-1].synchronize()
        return [a.elapsed_time(b) * 1e3 / self.calls for a, b in zip(events, events[1:])], device

    def burst(self):
        replays = int(min(max(BURST_MS * 1e3 / (self.timed(1)[0][0] * self.calls), 3), 21))
        time.sleep(PAUSE_S)
        times, device = self.timed(1 + replays)
        return times[1:], device

    def sustained(self, seconds, replays):
        torch = self.torch
        end = time.monotonic() + seconds
        before = None
        with torch.cuda.stream(self.stream):
            while time.monotonic() < end:
                self.graph.replay()
                event = torch.cuda.Event()
                event.record()
                if before is not None:
                    before.synchronize()
                before = event
        return self.timed(replays)


def device_state(torch):
    try:
        return {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3,
                "celsius": torch.cuda.temperature()}
    except Exception:  # it needs a package for NVML
        return {"sm_mhz": None, "watts": None, "celsius": None}


def measure(torch, sequences, tokens, layout, options, ceilings):
    call = Call(torch, sequences, tokens, layout)
    shape = f"{sequences}x{tokens // 1024}K"
    relative_l2 = call.relative_l2()
    result = {"op": "attend", "row": "torch cudnn", "format": "bf16", "layout": layout,
              "label": f"peer cudnn bf16 {HEADS}/{KV_HEADS} d{DIM} {shape} {layout}",
              "shape": shape, "q_heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM,
              "kv_bytes": call.kv_bytes, "sets": call.sets, "calls_per_graph": call.calls,
              "rel_l2": relative_l2, "checked": relative_l2 <= MAX_RELATIVE_L2}
    for state in ("burst", "sustained"):
        if options.state not in (state, "both"):
            continue
        times, device = (call.burst() if state == "burst" else
                         call.sustained(options.seconds, options.replays))
        us = statistics.median(times)
        result[state] = {"us": us, "us_min": min(times), "us_max": max(times),
                         "bytes_per_second": call.kv_bytes / us * 1e6, "device": device}
        if state in ceilings:
            result[state]["share_of_read"] = call.kv_bytes / us * 1e6 / ceilings[state]
        print(f"  {result['label']:<50} {state:<9} {us:8.2f} us "
              f"{call.kv_bytes / us * 1e-6:6.3f} TB/s", file=sys.stderr)
    return result


def ceilings_of(raw):
    """Bytes per second of the kernel that only reads, in each state."""
    ceilings = {}
    for result in raw["results"]:
        for state in ("burst", "sustained"):
            if result["op"] == "attend_read" and state in result:
                rate = result[state]["bytes_per_second"]
                ceilings[state] = max(rate, ceilings.get(state, 0))
    return ceilings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--state", choices=("sustained", "burst", "both"), default="both")
    parser.add_argument("--replays", type=int, default=21)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("there is no PyTorch here: nothing was measured")
        return 0
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU here: nothing was measured")
        return 0
    with open(options.file, encoding="utf-8") as file:
        raw = json.load(file)
    ceilings = ceilings_of(raw)
    torch.manual_seed(5)
    results = []
    for sequences, tokens in SHAPES:
        for layout in LAYOUTS:
            try:
                results.append(measure(torch, sequences, tokens, layout, options, ceilings))
            except RuntimeError as error:  # a layout that cuDNN does not take
                print(f"{sequences} x {tokens} {layout}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
    raw["peers"] = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                    "gpu": torch.cuda.get_device_name(), "results": results}
    with open(options.file, "w", encoding="utf-8") as file:
        json.dump(raw, file, indent=1)
    return 0 if results and all(result["checked"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
