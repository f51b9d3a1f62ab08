#!/usr/bin/env python3
"""Sums CTest's JUnit files: prints "N passed, N failed, N skipped".

    results.py [--skipped N] FILE...

A test that could not be started counts as failed. --skipped adds tests that were left out.
"""
import argparse
import sys
import xml.etree.ElementTree as ElementTree


def outcome(case: ElementTree.Element) -> str:
    status = case.get("status")
    if status == "run":
        return "passed"
    if status == "disabled":
        return "skipped"
    skipped = case.find("skipped")
    if status == "notrun" and skipped is not None and "SKIP" in skipped.get("message", ""):
        return "skipped"  # by SKIP_RETURN_CODE or SKIP_REGULAR_EXPRESSION
    return "failed"


def count(paths) -> dict:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            counts[outcome(case)] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skipped", type=int, default=0)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    counts = count(arguments.files)
    counts["skipped"] += arguments.skipped
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
