#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""Runs rdma-core's own tests, each in a process of its own, and writes what became of each.

  suite.py --tests FOLDER --out FILE.json --device DEV --address IP [--limit S] [--only SUBSTRING...]

Runs inside a testbed host. A test that does not end within the limit is "hung" and its processes are
killed; one that dies of a signal is "crashed"; the rest go on. Outcomes: passed, skipped, failed, hung,
crashed. Environment (LD_PRELOAD and so on) is that of the caller. Status 0: every test has an outcome.

The suite finds IP addresses by /sys/class/infiniband/DEV/device/net, which a soft-RoCE device has not: its
rdma_cm tests would all be skipped. They get the address given here.
"""
import argparse
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import unittest

DETAIL_CHARS = 4000     # kept of what a failed test says
REAP_TIMEOUT_S = 5
FORCED_KEY_BIT = 1 << 30    # as in libmigr/preload.cc
FORCED_QPN_BIT = 1 << 23


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--tests", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--device", required=True)
    p.add_argument("--address", required=True)
    p.add_argument("--limit", type=float, default=60)
    p.add_argument("--only", nargs="*", default=[])
    return p.parse_args()


def gid_of(device, address):
    """Index of the RoCE v2 GID of an IPv4 address."""
    last = "".join(f"{int(part):02x}" for part in address.split("."))
    port = f"/sys/class/infiniband/{device}/ports/1"
    for i in sorted(map(int, os.listdir(f"{port}/gids"))):
        with open(f"{port}/gids/{i}", encoding="ascii") as f:
            gid = f.read().strip().replace(":", "")
        if not gid.endswith("0000ffff" + last):
            continue
        with open(f"{port}/gid_attrs/types/{i}", encoding="ascii") as f:
            if "v2" in f.read():
                return i
    sys.exit(f"suite: {device} has no RoCE v2 GID of {address}")


def load(folder, device, address):
    """The tests by name, in the suite's own order."""
    sys.path.insert(0, folder)
    sys.path.insert(0, os.path.dirname(folder))
    sys.argv[1:] = ["--dev", device]
    importlib.import_module("args_parser").parser.parse_args()
    package = importlib.import_module("tests")
    base = importlib.import_module("tests.base")
    base.RDMATestCase._get_ip_mac = lambda self, dev, port, idx: self.args.append([dev, port, idx, address, None])
    found = {}

    def walk(suite):
        for t in suite:
            if isinstance(t, unittest.TestSuite):
                walk(t)
            else:
                found[t.id()] = t

    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    more = importlib.import_module("more")
    more.ADDRESS, more.DEVICE, more.GID_INDEX = address, device, gid_of(device, address)
    for module in package.__test_modules__ + [more]:
        walk(unittest.defaultTestLoader.loadTestsFromModule(module))
    # Loads the providers once, not in every child. No device is opened here.
    importlib.import_module("pyverbs.device").get_device_list()
    return found


def run_here(test):
    """(outcome, what it says), in this process."""
    result = unittest.TestResult()
    test.run(result)
    if result.errors or result.failures:
        return "failed", "".join(text for _, text in result.errors + result.failures)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.expectedFailures:
        return "failed", "expected failure"
    return "passed", ""


def child(test, pipe, log):
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        outcome, detail = run_here(test)
    except BaseException:  # pylint: disable=broad-except
        outcome, detail = "failed", traceback.format_exc()
    os.write(pipe, json.dumps([outcome, detail[-DETAIL_CHARS:]]).encode())
    sys.stdout.flush()
    # Destructors of what the test has left run as they do at the end of a program.
    test = None
    os.close(pipe)
    sys.exit(0)


def reap(pid, deadline):
    """Exit status of `pid`, or None when it is still there at the deadline."""
    while True:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def run_apart(test, limit, log_path):
    log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    reader, writer = os.pipe()
    begun = time.monotonic()
    deadline = begun + limit
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        child(test, writer, log)
    os.close(writer)
    said = b""
    # Grandchildren hold the pipe too: what counts is the report, not its end.
    while not said:
        ready, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        said += part
    os.close(reader)
    status = reap(pid, max(deadline, time.monotonic() + REAP_TIMEOUT_S))
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(pid, 0)
    with open(log_path, "rb") as f:
        text = f.read()[-DETAIL_CHARS:].decode(errors="replace")
    os.close(log)
    outcome, detail = json.loads(said) if said else ("", "")
    if status is None:
        outcome, detail = "hung", f"no end within {limit:.0f} s" + (f" after it had {outcome}\n{detail}" if outcome else "")
    elif os.WIFSIGNALED(status):
        outcome, detail = "crashed", f"{signal.Signals(os.WTERMSIG(status)).name}" + (
            f" after it had {outcome}\n{detail}" if outcome else "")
    elif not outcome:
        outcome, detail = "crashed", f"ended with {os.waitstatus_to_exitcode(status)} before it had an outcome"
    return {"outcome": outcome, "detail": detail, "output": text, "seconds": round(time.monotonic() - begun, 2)}


def check_preload():
    """What LD_PRELOAD names has to be there, and migr.ko with it: else the run would say nothing."""
    preload = os.environ.get("LD_PRELOAD")
    if not preload:
        return
    with open("/proc/self/maps", encoding="ascii") as f:
        if os.path.realpath(preload) not in f.read():
            sys.exit(f"suite: {preload} is not loaded")
    if not os.path.exists("/dev/migr"):
        sys.exit("suite: migr.ko is not loaded")


def check_names(device):
    """With MIGR_FORCE_SWITCHED=names an lkey and an RC QP's number are not the device's; else they are. In a child: the tests
    shall find no context opened before them."""
    pid = os.fork()
    if pid:
        if os.waitpid(pid, 0)[1]:
            sys.exit("suite: the objects of this run are not named as it wants them")
        return
    from pyverbs import cq, device as dev, enums, mr, pd, qp  # pylint: disable=import-outside-toplevel
    forced = os.environ.get("MIGR_FORCE_SWITCHED") == "names"
    with dev.Context(name=device) as context, pd.PD(context) as domain, cq.CQ(context, 4) as queue:
        with mr.MR(domain, 64, enums.IBV_ACCESS_LOCAL_WRITE) as memory:
            init = qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=qp.QPCap())
            with qp.QP(domain, init) as pair:
                if {bool(memory.lkey & FORCED_KEY_BIT), bool(pair.qp_num & FORCED_QPN_BIT)} != {forced}:
                    sys.exit(f"suite: lkey {memory.lkey:#x}, QPN {pair.qp_num:#x}")
    sys.exit(0)


def main():
    a = arguments()
    check_preload()
    tests = load(os.path.abspath(a.tests), a.device, a.address)
    check_names(a.device)
    names = [n for n in tests if not a.only or any(o in n for o in a.only)]
    results = {}
    for i, name in enumerate(names):
        results[name] = run_apart(tests[name], a.limit, "/tmp/conformance-test.log")
        r = results[name]
        print(f"{i + 1}/{len(names)} {r['outcome']} {name} ({r['seconds']} s)", flush=True)
        with open(a.out + ".part", "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
    os.rename(a.out + ".part", a.out)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
