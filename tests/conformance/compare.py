#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""Compares runs of rdma-core's tests: the first two are without libmigr.

  compare.py --out SUMMARY.json --flaky LIST [--kernel V] [--part] BASELINE.json BASELINE-AGAIN.json RUN.json...

Prints the number of tests per outcome side by side and every test that is not the same in all. Status 1:
a test has another outcome, or was skipped for another reason, than without libmigr; or differs between the
first two and is not in LIST. A line of LIST is TEST: REASON; such a test may pass or fail, anything else
(hung, crashed, skipped) counts. A line whose test does not exist fails too.
"""
import argparse
import json
import os
import sys

OUTCOMES = ("passed", "skipped", "failed", "hung", "crashed")
MAY_VARY = {"passed", "failed"}
SHOWN_LINES = 12


def read_flaky(path):
    flaky = {}
    with open(path, encoding="utf-8") as f:
        for line in f:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            test, _, reason = line.partition(": ")
            if not reason:
                sys.exit(f"{path}: no reason for {test}")
            flaky[test] = reason
    return flaky


def said(result):
    """What has to be equal: the outcome, and why it was skipped."""
    return result["outcome"], result["detail"] if result["outcome"] == "skipped" else ""


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--flaky", required=True)
    p.add_argument("--kernel", default="")
    p.add_argument("--part", action="store_true", help="not the whole suite was run")
    p.add_argument("runs", nargs="+")
    a = p.parse_args()
    if len(a.runs) < 2:
        p.error("two baselines at least")
    names = [os.path.basename(r).removesuffix(".json") for r in a.runs]
    runs = []
    for r in a.runs:
        with open(r, encoding="utf-8") as f:
            runs.append(json.load(f))
    flaky = read_flaky(a.flaky)
    tests = list(dict.fromkeys(t for r in runs for t in r))
    missing = {"outcome": "missing", "detail": ""}

    width = max(len(n) for n in names) + 2
    print(" " * 10 + "".join(f"{n:>{width}}" for n in names))
    counts = {n: {o: sum(t["outcome"] == o for t in r.values()) for o in OUTCOMES} for n, r in zip(names, runs)}
    for o in OUTCOMES:
        print(f"{o:10}" + "".join(f"{counts[n][o]:{width}}" for n in names))

    bad = []
    unstable = []
    for t in tests:
        results = [r.get(t, missing) for r in runs]
        if len({said(r) for r in results}) == 1:
            continue
        row = {"test": t, "outcomes": {n: r["outcome"] for n, r in zip(names, results)}}
        if t in flaky and {r["outcome"] for r in results} <= MAY_VARY:
            unstable.append({**row, "reason": flaky[t]})
            continue
        bad.append(row)
        print(f"\ndiffers: {t}")
        shown = set()
        for n, r in zip(names, results):
            print(f"  {n}: {r['outcome']}")
            text = (r["detail"] + r.get("output", "")).strip()
            if r["outcome"] != "passed" and text not in shown:
                shown.add(text)
                for line in text.splitlines()[-SHOWN_LINES:]:
                    print(f"      {line}")
    for row in unstable:
        print(f"\nvaries, as {os.path.basename(a.flaky)} says ({row['reason']}): {row['test']} {row['outcomes']}")
    unknown = [] if a.part else [t for t in flaky if t not in tests]
    for t in unknown:
        print(f"\n{a.flaky}: no such test: {t}")
    fails = [t for t in tests if runs[0].get(t, missing)["outcome"] not in ("passed", "skipped")]
    if fails:
        print("\nnot passed without libmigr: " + ", ".join(fails))
    with open(a.out, "w", encoding="utf-8") as f:
        json.dump({"kernel": a.kernel, "tests": len(tests), "counts": counts, "differences": bad, "varying": unstable,
                   "failed_without_libmigr": fails}, f, indent=1)
    ran = all(c["passed"] for c in counts.values())
    ok = ran and not bad and not unknown
    print(f"\nconformance: {len(tests)} tests, {len(bad)} differ" + ("" if ran else "; a run has passed none"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
