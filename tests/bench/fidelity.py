#!/usr/bin/env python3
"""What each KV format, encoder and key transform costs a model, measured through real pools.

    fidelity.py run [OPTION...] --output RAW.json     measures; goes on where an earlier run stopped
    fidelity.py table RAW.json [--kernels KERNELS-GPU.json]     prints the README's table

`run` starts a keeper and a larderd for each combination and scores the text with larder-generate
(bits per byte, teacher forcing, windows of the model's context). Key offsets are calibrated on other
windows than those that are scored. Attention's error is attention_error's: the first windows' real
queries, keys and values (of a bf16 run) through a pool of the combination and one of bf16.
Without options: tiny-lm on tests/data/fidelity.txt, calibrated on its first half, scored on the
second. The output holds one set per model and text.
"""
import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
START_S = 60  # that a node may take to be ready


class Combination(NamedTuple):
    k_format: str
    v_format: str
    encoder: str
    transform: str

    def key(self) -> str:
        return "/".join(self)

    def is_centred(self) -> bool:
        return self.transform.startswith("centred")


TRANSFORMS = ("none", "centred", "rotated", "centred_rotated")
ENCODERS = ("reference", "four_over_six", "best_scale")
FP8, NVFP4 = "fp8_e4m3", "nvfp4"


def combinations() -> List[Combination]:
    """Encoders make a difference to nvfp4 alone. bf16, without anything, comes first."""
    result = [Combination(f, f, "reference", "none") for f in ("bf16", "fp16")]
    for both in ("bf16", FP8, "fp8_e5m2"):
        result += [Combination(both, both, "reference", transform) for transform in TRANSFORMS]
    for encoder in ENCODERS:
        result += [Combination(NVFP4, NVFP4, encoder, transform) for transform in TRANSFORMS]
    result += [Combination(FP8, NVFP4, "reference", "none"),
               Combination(FP8, NVFP4, "best_scale", "centred"),
               Combination(NVFP4, FP8, "reference", "none"),
               Combination(NVFP4, FP8, "best_scale", "centred_rotated")]
    return list(dict.fromkeys(result))


class Node:
    """A keeper and a larderd in a folder of their own."""

    def __init__(self, bin_folder: Path, device: str):
        self.folder = tempfile.TemporaryDirectory(prefix="fidelity-")
        self.bin_folder, self.device = bin_folder, device
        self.socket = self.folder.name + "/larderd.sock"
        self.processes: List[subprocess.Popen] = []

    def __enter__(self) -> "Node":
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait()
        self.folder.cleanup()

    def spawn(self, program: str, *options: str) -> None:
        with open(f"{self.folder.name}/{program}.log", "wb") as log:
            self.processes.append(subprocess.Popen(
                [str(self.bin_folder / program), *options], stdout=log, stderr=log))

    def start(self) -> None:
        keeper = self.folder.name + "/keeper.sock"
        self.spawn("larder-keeper", "--socket", keeper)
        self.wait_for(lambda: os.path.exists(keeper), "larder-keeper")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.spawn("larderd", "--socket", self.socket, "--keeper", keeper, "--http-port", str(port),
                   "--device", self.device, "--memory-bytes", "8GiB", "--log-level", "warning")
        self.wait_for(lambda: self.is_ready(port), "larderd")

    @staticmethod
    def is_ready(port: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def wait_for(self, is_there, program: str) -> None:
        end = time.monotonic() + START_S
        while not is_there():
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                log = Path(f"{self.folder.name}/{program}.log").read_text(errors="replace")
                raise RuntimeError(f"{program} is not ready: {log}")
            time.sleep(0.02)


def run_json(*argv: str) -> dict:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


class Measurement:
    """One model on one text: everything that its combinations share."""

    def __init__(self, options: argparse.Namespace, work: Path):
        self.options, self.work = options, work
        self.offsets, self.dump = str(work / "offsets"), str(work / "dump")
        with open(Path(options.model) / "config.json", encoding="utf-8") as file:
            self.context = json.load(file)["max_position_embeddings"]

    def generate(self, node: Node, text: str, first: int, windows: int, *more: str) -> dict:
        return run_json(str(self.options.bin / "larder-generate"), "--socket", node.socket, "--model",
                        self.options.model, "--device", self.options.device, "--json", "--quiet",
                        "--score", text, "--first-window", str(first), "--windows", str(windows),
                        *more)

    def prepare(self) -> None:
        """Calibrates, and dumps what attention works on."""
        o = self.options
        keys = str(self.work / "keys")
        with Node(o.bin, o.device) as node:
            self.generate(node, o.calibration_text, o.calibration_first, o.calibration_windows,
                          "--format", "bf16", "--dump-keys", keys)
            self.generate(node, o.text, o.first_window, min(o.attention_windows, o.windows),
                          "--format", "bf16", "--dump-attention", self.dump)
        subprocess.run([str(o.bin / "larderctl"), "calibrate", keys, "-o", self.offsets], check=True,
                       stdout=subprocess.DEVNULL)
        os.remove(keys)

    def measure(self, c: Combination) -> dict:
        o = self.options
        with Node(o.bin, o.device) as node:
            more = ["--key-offsets", self.offsets] if c.is_centred() else []
            score = self.generate(node, o.text, o.first_window, o.windows, "--k-format", c.k_format,
                                  "--v-format", c.v_format, "--encoder", c.encoder,
                                  "--key-transform", c.transform, *more)
            error = run_json(str(o.bin / "attention_error"), node.socket, o.device, self.dump,
                             str(self.context), *c, *more[1:])
        return {"bits_per_byte": score["mean"], "bits_per_byte_each": score["bits_per_byte_each"],
                "attention": error, "summary": score["summary"]}


def description(options: argparse.Namespace) -> dict:
    """What must be the same for results to belong together."""
    return {"model": Path(options.model).name, "text": Path(options.text).name,
            "text_bytes": os.path.getsize(options.text), "first_window": options.first_window,
            "windows": options.windows,
            "calibration": [Path(options.calibration_text).name, options.calibration_first,
                            options.calibration_windows],
            "attention_windows": min(options.attention_windows, options.windows)}


def gpu_name(device: str) -> Optional[str]:
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                              capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if device == "host" else done.stdout.splitlines()[0]


def conditions(options: argparse.Namespace) -> dict:
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "device": options.device, "gpu": gpu_name(options.device), "cpus": os.cpu_count(),
            "commit": options.commit}


def write(path: Path, raw: dict) -> None:
    """As a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def measure_all(options: argparse.Namespace) -> int:
    path = Path(options.output)
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    name = f"{Path(options.model).name} on {Path(options.text).name}"
    wanted = description(options)
    one = raw.setdefault(name, {**wanted, "conditions": conditions(options), "results": {}})
    if {key: one[key] for key in wanted} != wanted:
        print(f"{path} has \"{name}\" of other windows; give another --output", file=sys.stderr)
        return 1
    missing = [c for c in combinations() if c.key() not in one["results"]
               and (not options.only or any(part in c.key() for part in options.only))]
    started = time.monotonic()
    failures = left = 0

    def work(measurement: Measurement, c: Combination) -> Optional[dict]:
        late = time.monotonic() - started > options.time_limit
        return None if late else measurement.measure(c)

    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder, \
            concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        measurement = Measurement(options, Path(folder))
        if missing:
            measurement.prepare()
            print(f"prepared after {time.monotonic() - started:.0f} s", file=sys.stderr)
        futures = {pool.submit(work, measurement, c): c for c in missing}
        for future in concurrent.futures.as_completed(futures):
            key = futures[future].key()
            try:
                result = future.result()
            except (RuntimeError, OSError, ValueError) as error:
                print(f"{key}: {error}", file=sys.stderr)
                failures += 1
                continue
            if result is None:
                left += 1
                continue
            one["results"][key] = result
            write(path, raw)
            print(f"{time.monotonic() - started:6.0f} s  {key}: {result['bits_per_byte']:.5f} "
                  f"bits/byte, attention {result['attention']['rel_l2']:.4f}", file=sys.stderr)
    print(f"{len(one['results'])} of {len(combinations())} combinations, {failures} failed, "
          f"{left} left for the next run", file=sys.stderr)
    return 1 if failures else 0


# From the format study of the models (PyTorch, 200 windows of sample.txt): bits per byte.
STUDY: Dict[str, Dict[str, float]] = {
    "tiny-lm": {"bf16/bf16/reference/none": 1.18274, "fp8_e4m3/fp8_e4m3/reference/none": 1.18838,
                "nvfp4/nvfp4/reference/none": 1.23280, "nvfp4/nvfp4/four_over_six/none": 1.22020,
                "fp8_e4m3/nvfp4/reference/none": 1.19287, "nvfp4/fp8_e4m3/reference/none": 1.22715},
    "small-lm": {"bf16/bf16/reference/none": 1.03988, "fp8_e4m3/fp8_e4m3/reference/none": 1.04168,
                 "nvfp4/nvfp4/reference/none": 1.05420, "nvfp4/nvfp4/four_over_six/none": 1.05138,
                 "fp8_e4m3/nvfp4/reference/none": 1.04469, "nvfp4/fp8_e4m3/reference/none": 1.05123},
}
BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "nvfp4": 0.5625}


def append_times(path: Optional[str]) -> Dict[str, float]:
    """Microseconds for 32,768 tokens of 8 heads of 128, by combination: of the row that runs."""
    times: Dict[str, float] = {}
    if path is None:
        return times
    with open(path, encoding="utf-8") as file:
        results = json.load(file)["results"]
    shape = {"op": "append", "tokens": 32768, "dim": 128, "heads": 8, "layers": 1, "rope": "none",
             "input": "bf16", "slot_bits": 64}
    for result in results:
        if "us_median" in result and all(result.get(k) == v for k, v in shape.items()):
            key = Combination(result["format"], result["format"], result["encoder"],
                              result["key_transform"]).key()
            times.setdefault(key, result["us_median"])
    return times


def cells_of(one: dict, key: str) -> List[str]:
    result = one["results"].get(key)
    if result is None:
        return ["", ""]
    bits = result["bits_per_byte"]
    plain = one["results"].get("bf16/bf16/reference/none")
    loss = f" ({100 * (bits / plain['bits_per_byte'] - 1):+.3f} %)" if plain else ""
    return [f"{bits:.5f}{loss}", f"{result['attention']['rel_l2']:.4f}"]


def agreement(one: dict) -> Iterator[str]:
    study = STUDY.get(one["model"], {})
    if one["text"] != "sample.txt" or one["first_window"] != 0 or one["windows"] != 200:
        return
    for key, wanted in study.items():
        if key in one["results"]:
            percent = 100 * (one["results"][key]["bits_per_byte"] / wanted - 1)
            verdict = "" if abs(percent) <= 0.02 else ", MORE THAN 0.02 %"
            yield f"{one['model']}, {key}: {percent:+.4f} % of the study's{verdict}"


def print_table(options: argparse.Namespace) -> int:
    with open(options.raw, encoding="utf-8") as file:
        sets = json.load(file)
    append = append_times(options.kernels)
    header = ["K", "V", "encoder", "keys", "bytes a value"]
    for name, one in sets.items():
        mark = ", reference run" if one["text"] == "sample.txt" else ""  # text that is not ours
        header += [f"{name}{mark}: bits/byte (loss)", "attention error"]
    header.append("append, us")
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for c in combinations():
        row = [*c, f"{(BYTES[c.k_format] + BYTES[c.v_format]) / 2:.4g}"]
        for one in sets.values():
            row += cells_of(one, c.key())
        row.append(f"{append[c.key()]:.1f}" if c.key() in append else "")
        print(f"| {' | '.join(row)} |")
    print("\nBits per byte of a text that the model is shown, windows of its context; the loss is against "
          "bf16.\nAttention error: |out - out_bf16| / |out_bf16| over all layers, heads and rows of the "
          "first windows,\nfor the same queries, keys and values (of the bf16 run). Append: 32,768 tokens "
          "of 8 heads of 128.\n")
    for name, one in sets.items():
        places = {result["summary"]["model_on"] for result in one["results"].values()}
        text, first, windows = one["calibration"]
        print(f"{name}: {one['windows']} windows from {one['first_window']} on, calibrated on {windows} "
              f"of {text} from {first} on, attention of {one['attention_windows']}; "
              f"{one['conditions']['date']}, model on {', '.join(sorted(places))}.")
    for one in sets.values():
        for line in agreement(one):
            print(line)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    text = str(ROOT / "tests/data/fidelity.txt")
    run.add_argument("--bin", type=Path, default=ROOT / "build-gpu/bin", help="folder of programs")
    run.add_argument("--model", default=str(ROOT / "tests/data/tiny-lm"))
    run.add_argument("--text", default=text)
    run.add_argument("--first-window", type=int, default=21)
    run.add_argument("--windows", type=int, default=22)
    run.add_argument("--calibration-text", default=text)
    run.add_argument("--calibration-first", type=int, default=0)
    run.add_argument("--calibration-windows", type=int, default=21)
    run.add_argument("--attention-windows", type=int, default=4)
    run.add_argument("--device", default="host", help="host, auto or a GPU's UUID")
    run.add_argument("--jobs", type=int, default=1, help="combinations at a time")
    run.add_argument("--time-limit", type=float, default=1e9,
                     help="seconds after which no combination is begun")
    run.add_argument("--only", action="append", help="a part of K/V/ENCODER/TRANSFORM")
    run.add_argument("--commit", default=os.environ.get("LARDER_COMMIT", ""))
    run.add_argument("--output", required=True)
    table = commands.add_parser("table")
    table.add_argument("raw")
    table.add_argument("--kernels", help="what kernels_gpu_bench printed, for the times of append")
    return parser.parse_args()


def main() -> int:
    options = parse()
    return measure_all(options) if options.command == "run" else print_table(options)


if __name__ == "__main__":
    sys.exit(main())
