# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""What the benchmarks between hosts of a test bed share: the bed, figures in tables, pieces of plots."""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "build/bench"
BED = os.environ.setdefault("MIGR_BED", "bench")
QUICK = os.environ.get("QUICK", "0") not in ("", "0")


class Failed(Exception):
    pass


def log(text):
    print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---- the bed

def bed(command, limit=120, env=None, check=True, quiet=False):
    """Runs shell code with tests/e2e/lib.sh loaded. @return (status, stdout)"""
    e = dict(os.environ, E2E_KEEP="1", **{k: str(v) for k, v in (env or {}).items()})
    try:
        r = subprocess.run(["bash", "-c", f". tests/e2e/lib.sh; {command}"], cwd=ROOT, env=e, timeout=limit, text=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"'{command}' took longer than {limit} s") from None
    if r.returncode and check:
        if not quiet:
            sys.stderr.write(r.stdout[-2000:] + r.stderr[-6000:])
        lines = [line for line in r.stderr.strip().splitlines() if not line.startswith(("#", "---", "{"))]
        raise Failed(lines[-1] if lines else f"'{command}' ended with status {r.returncode}")
    return r.returncode, r.stdout


def bed_up(mem_mb):
    """@return True: it was not up before"""
    was_up = bed("bed_is_up", check=False)[0] == 0
    log("bringing up the hosts")
    bed("e2e_up", limit=600, env={"E2E_MEM": os.environ.get("E2E_MEM", str(mem_mb)), "E2E_LIFETIME": 7200})
    return not was_up


def bed_down(started):
    if started and not os.environ.get("E2E_KEEP"):
        bed("testbed down", limit=120, check=False)


def bed_of():
    """What the bed is made of."""
    kernel = bed("e2e_kernel")[1].strip()
    return {"accel": json.loads(bed("testbed status --json")[1]).get("accel"), "kernel": kernel}


def kernel_complaints():
    """@return what a kernel has complained of since the last call; "": nothing"""
    status, bad = bed("console_clean", check=False)
    return "a kernel has complained: " + bad.strip()[:300] if status else ""


# ---- figures

def spread(values):
    return [round(v, 3) for v in (min(values), statistics.median(values), max(values))]


def median(values):
    return round(statistics.median(values), 3) if values else None


def fmt(v, digits=0):
    return "-" if v is None else f"{v:.{digits}f}"


def fmt3(v, digits=0):
    return "-" if not v else f"{v[1]:.{digits}f} ({v[0]:.{digits}f}..{v[2]:.{digits}f})"


def print_table(lines, left):
    """`lines`: of strings, the head first. @param left: so many columns are words"""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip())


def verdict(what, seen, want, good):
    return f"{'met   ' if good else 'missed'} {what}: {seen} (target {want})"


def not_measured(what, want):
    return f"not measured: {what} (target {want})"


# ---- plots

W, H, M = 960, 400, 64


def svg_open(title, width=W, height=H):
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>', f'<text x="{M}" y="22" font-size="15">{title}</text>']


def axes(out, x0, x1, y0, y1, xlabel, ylabel, top, ticks=4):
    out.append(f'<path d="M{x0},{y0} V{y1} H{x1}" fill="none" stroke="black"/>')
    for t in range(ticks + 1):
        y = y1 - (y1 - y0) * t / ticks
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.0f}" text-anchor="end">{top * t / ticks:.4g}</text>')
    out.append(f'<text x="{(x0 + x1) / 2:.0f}" y="{y1 + 36}" text-anchor="middle">{xlabel}</text>')
    out.append(f'<text transform="translate({x0 - 48},{(y0 + y1) / 2:.0f}) rotate(-90)" text-anchor="middle">{ylabel}</text>')
