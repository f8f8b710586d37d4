# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""One process per bed: starts the switch and the VMs, relays commands to them,
ends them. Everything it started dies with it (PDEATHSIG), whatever way it goes.

Works in the bed's folder with relative socket paths, since those are limited
to 107 bytes. `bed.sock` takes one JSON line per connection and answers one; an
"exec" goes on with frames (tests/testbed/frame.h).
"""
import asyncio
import glob
import json
import os
import re
import signal
import struct
import time

import wire

MGMT = "mgmt"
QMP_TIMEOUT_S = 20
# TCG executes "rep movsb" byte by byte. On a processor that says it is fast, kernel and C library copy and clear memory that
# way: 2 to 20 times as long as by words.
EMULATED_CPU = "max,-erms,-fsrm"
LIFETIME_GRACE_S = 20


def process_start(pid):
    """Start time of a process in ticks, None if there is none: a pid may be given again."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _option(text):
    """A value inside a QEMU option list."""
    return str(text).replace(",", ",,")


class HostDead(Exception):
    pass


class Host:
    def __init__(self, bed, name, number):
        self.bed, self.name, self.number = bed, name, number
        self.process = None
        self.state = "off"  # off, booting, up, failed, dead
        self.reason = ""
        self.ready = None       # future: set-up is over
        self.ctl = None         # StreamWriter to the guest's agent
        self.clients = {}       # channel -> StreamWriter
        self.next_channel = 1
        self.qmp = None
        self.qmp_lock = asyncio.Lock()
        self.boot_started = self.boot_seconds = 0.0
        self.servers = []

    def networks(self):
        return [MGMT] + [f"rail{r}" for r in range(self.bed.conf["rails"])]

    def argv(self):
        c = self.bed.conf
        kvm = c["accel"] == "kvm"
        # Linux takes the TSCs of two processors of this make for unsynchronized and reads its clock from the HPET, each time by
        # way of the emulator; TCG's all are the host's.
        append = ["console=ttyS0", "panic=-1", "no_timer_check", "tsc=reliable", "panic_on_warn=1", "oops=panic", "mitigations=off", "no5lvl",
                  "net.ifnames=0", "rcupdate.rcu_cpu_stall_timeout=120", "nowatchdog", "systemd.unified_cgroup_hierarchy=1",
                  f"tb.host={self.name}", f"tb.num={self.number}", c["append"]]
        a = ["qemu-system-x86_64", "-name", f"testbed-{c['name']}-{self.name}",
             "-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "host" if kvm else EMULATED_CPU,
             # TCG of QEMU 7.2 leaves the guest's memory barriers out where there can be one processor only, though devices
             # run in another thread: a virtio device misses its doorbell then and stands still (NETDEV WATCHDOG).
             "-smp", f"{c['cpus']},maxcpus={max(c['cpus'], 2)}", "-m", str(c["mem"]),
             "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
             "-kernel", c["image"], "-initrd", c["initramfs"], "-append", " ".join(append),
             "-chardev", f"file,id=con,path={self.name}/console.log,append=on", "-serial", "chardev:con",
             "-chardev", f"socket,id=qmp,path={self.name}/qmp.sock", "-mon", "chardev=qmp,mode=control",
             "-chardev", f"socket,id=ctl,path={self.name}/ctl.sock",
             "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=ctl,name=migr.ctl",
             "-device", "virtio-rng-pci"]
        for tag, path, mode in (("root", c["rootfs"], "readonly=on"), ("tree", c["root"], "readonly=on"),
                                ("out", f"{self.name}/out", "writeout=immediate")):
            a += ["-virtfs", f"local,path={_option(path)},mount_tag={tag},id={tag},security_model=none,"
                             f"multidevs=remap,{mode}"]
        for i, network in enumerate(self.networks()):
            a += ["-netdev", f"stream,id={network},server=off,addr.type=unix,addr.path=sw-{network}-{self.name}.sock",
                  "-device", f"virtio-net-pci,netdev={network},addr={0x10 + i:#x},romfile=,"
                             f"mac=52:54:00:77:{i:02x}:{self.number:02x}"]
        return a

    async def start(self):
        os.makedirs(f"{self.name}/out", exist_ok=True)
        self.state, self.reason = "booting", ""
        self.ready = asyncio.get_running_loop().create_future()
        self.boot_started = time.monotonic()
        for s in self.servers:
            s.close()
        self.servers = [await asyncio.start_unix_server(handler, path=f"{self.name}/{name}")
                        for name, handler in (("ctl.sock", self.serve_ctl), ("qmp.sock", self.serve_qmp))]
        with open(f"{self.name}/qemu.log", "ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                "setpriv", "--pdeathsig", "KILL", "--", *self.argv(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log)
        self.bed.record()
        self.bed.spawn(self.wait())

    async def wait(self):
        code = await self.process.wait()
        was = self.state
        self.state = "dead"
        self.reason = self.reason or self.why_ended(code)
        self.bed.log(f"{self.name}: ended ({self.reason})")
        for channel in list(self.clients):
            self.finish_client(channel, wire.STATUS_FAILED, f"host {self.name} ended: {self.reason}")
        if was == "booting" and not self.ready.done():
            self.ready.set_result(False)
        self.ctl = self.qmp = None

    def why_ended(self, code):
        try:
            with open(f"{self.name}/qemu.log", encoding="utf-8", errors="replace") as f:
                said = f.read().strip().splitlines()[-1:]
            with open(f"{self.name}/console.log", encoding="utf-8", errors="replace") as f:
                panics = re.findall(r"Kernel panic - not syncing: .*|testbed: .* failed.*|guest-agent: .*", f.read())
        except OSError:
            said, panics = [], []
        if panics:
            return panics[-1].strip()
        return f"QEMU exit status {code}" + (f": {said[0]}" if code and said else "")

    async def serve_qmp(self, reader, writer):
        await reader.readline()  # greeting
        self.qmp = (reader, writer)
        try:
            await self.monitor("qmp_capabilities")
        except (HostDead, asyncio.TimeoutError):
            self.qmp = None

    async def monitor(self, command, **arguments):
        async with self.qmp_lock:
            if not self.qmp:
                raise HostDead(f"host {self.name} is not running")
            reader, writer = self.qmp
            writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            while True:
                line = await asyncio.wait_for(reader.readline(), QMP_TIMEOUT_S)
                if not line:
                    raise HostDead(f"host {self.name} has ended")
                answer = json.loads(line)
                if "error" in answer:
                    raise HostDead(f"host {self.name}: {command}: {answer['error'].get('desc')}")
                if "return" in answer:
                    return answer["return"]

    async def serve_ctl(self, reader, writer):
        self.ctl = writer
        buffer = bytearray()
        try:
            while data := await reader.read(wire.PAYLOAD_MAX):
                buffer += data
                for channel, kind, payload in wire.split(buffer):
                    self.from_guest(channel, kind, payload)
        except (ConnectionError, ValueError) as e:
            self.bed.log(f"{self.name}: control port: {e}")

    def from_guest(self, channel, kind, payload):
        if kind == wire.READY:
            ok = struct.unpack("<I", payload)[0] == 0
            self.boot_seconds = time.monotonic() - self.boot_started
            self.state = "up" if ok else "failed"
            self.reason = "" if ok else "set-up in the guest failed"
            self.bed.log(f"{self.name}: {self.state} after {self.boot_seconds:.1f} s")
            if not self.ready.done():
                self.ready.set_result(ok)
            return
        client = self.clients.get(channel)
        if client is None:
            return
        client.write(wire.frame(0, kind, payload))
        if kind == wire.EXIT:
            del self.clients[channel]

    def finish_client(self, channel, status, text):
        client = self.clients.pop(channel, None)
        if client:
            client.write(wire.frame(0, wire.EXIT, struct.pack("<I", status) + text.encode()))

    async def relay(self, request, reader, writer):
        """Carries one client's frames until its command or it has ended."""
        if self.state not in ("up", "failed"):
            writer.write(wire.frame(0, wire.EXIT, struct.pack("<I", wire.STATUS_FAILED) + (
                f"host {self.name} is {self.state}" + (f": {self.reason}" if self.reason else "")).encode()))
            return
        channel = self.next_channel
        self.next_channel += 1
        self.clients[channel] = writer
        words = [request["cwd"], *request["env"], "", *request["argv"]]
        opening = b"".join(w.encode("utf-8", "surrogateescape") + b"\0" for w in words)
        if len(opening) > wire.PAYLOAD_MAX:
            self.finish_client(channel, wire.STATUS_FAILED, f"command line longer than {wire.PAYLOAD_MAX} bytes")
            return
        self.ctl.write(wire.frame(channel, wire.OPEN, opening))
        buffer = bytearray()
        try:
            while data := await reader.read(wire.PAYLOAD_MAX):
                buffer += data
                for _, kind, payload in wire.split(buffer):
                    if self.ctl and kind in (wire.STDIN, wire.KILL, wire.CREDIT_MORE):
                        self.ctl.write(wire.frame(channel, kind, payload))
        except (ConnectionError, ValueError):
            pass
        if self.clients.pop(channel, None) and self.ctl:
            self.ctl.write(wire.frame(channel, wire.CLOSE))

    def kill(self, reason):
        self.reason = reason
        if self.process and self.process.returncode is None:
            self.process.kill()


class Bed:
    def __init__(self, conf):
        self.conf = conf
        self.started = time.monotonic()
        self.hosts = {n: Host(self, n, i + 1) for i, n in enumerate(conf["hosts"])}
        self.switch = None
        self.over = asyncio.Event()
        self.tasks = set()

    def log(self, text):
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def spawn(self, coroutine):
        t = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(t)
        t.add_done_callback(self.tasks.discard)

    def record(self):
        """Who belongs to this bed, for a `down` that finds no supervisor."""
        pids = [os.getpid()] + [p.pid for p in [self.switch, *(h.process for h in self.hosts.values())] if p]
        with open("pids.part", "w", encoding="ascii") as f:
            json.dump([[pid, process_start(pid)] for pid in pids], f)
        os.replace("pids.part", "pids")

    async def run(self):
        ports = [f"{n}:{h.name}" for h in self.hosts.values() for n in h.networks()]
        self.switch = await asyncio.create_subprocess_exec(
            "setpriv", "--pdeathsig", "KILL", "--", self.conf["vswitch"], "sw", "switch.sock", *ports,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE)
        if (await asyncio.wait_for(self.switch.stdout.readline(), 10)).strip() != b"ready":
            raise RuntimeError("vswitch did not start")
        self.record()
        self.spawn(self.watch_switch())
        for h in self.hosts.values():
            await h.start()
        server = await asyncio.start_unix_server(self.serve, path="bed.sock")  # now there is a boot to wait for of each
        loop = asyncio.get_running_loop()
        for s in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(s, self.over.set)
        try:
            await asyncio.wait_for(self.over.wait(), self.conf["lifetime"])
            self.log("ending: asked to")
        except asyncio.TimeoutError:
            self.log(f"ending: its life of {self.conf['lifetime']} s is over")
        server.close()
        for h in self.hosts.values():
            h.kill("the bed was taken down")
        self.switch.kill()
        await asyncio.gather(self.switch.wait(), *(h.process.wait() for h in self.hosts.values() if h.process))

    async def watch_switch(self):
        await self.switch.wait()
        if not self.over.is_set():
            self.log("vswitch ended unexpectedly: taking the bed down")
            self.over.set()

    async def tell_switch(self, line):
        reader, writer = await asyncio.open_unix_connection("switch.sock", limit=1 << 20)
        writer.write(line.encode())
        answer = (await asyncio.wait_for(reader.readline(), 10)).decode().strip()
        writer.close()
        if answer.startswith("error"):
            raise HostDead(f"switch: {answer}")
        return answer

    async def serve(self, reader, writer):
        try:
            line = await reader.readline()
            if not line:
                return
            request = json.loads(line)
            if request["op"] == "exec":
                host = self.hosts.get(request["host"])
                if host:
                    await host.relay(request, reader, writer)
                else:
                    text = f"no host {request['host']} in this bed ({', '.join(self.hosts)})"
                    writer.write(wire.frame(0, wire.EXIT, struct.pack("<I", wire.STATUS_FAILED) + text.encode()))
            else:
                try:
                    answer = await getattr(self, "op_" + request["op"])(request)
                except (HostDead, KeyError, asyncio.TimeoutError, OSError) as e:
                    answer = {"error": str(e) if isinstance(e, HostDead) else repr(e)}
                writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def host(self, request):
        if request["host"] not in self.hosts:
            raise HostDead(f"no host {request['host']} in this bed ({', '.join(self.hosts)})")
        return self.hosts[request["host"]]

    async def op_ready(self, request):
        """Waits until every host is up, one has failed, or the limit is over."""
        wait = [h.ready for h in self.hosts.values() if h.ready]
        done, _ = await asyncio.wait([asyncio.shield(r) for r in wait], timeout=request["timeout"],
                                     return_when=asyncio.ALL_COMPLETED)
        late = len(wait) - len(done)
        bad = [f"{h.name} is {h.state}" + (f" ({h.reason})" if h.reason else "")
               for h in self.hosts.values() if h.state != "up"]
        if late or bad:
            return {"error": "; ".join(bad)}
        return {"boot_seconds": {h.name: round(h.boot_seconds, 1) for h in self.hosts.values()}}

    async def op_status(self, _):
        switch = json.loads(await self.tell_switch("stats\n"))
        return {"name": self.conf["name"], "kernel": self.conf["kernel"], "accel": self.conf["accel"],
                "seconds_left": round(self.conf["lifetime"] - (time.monotonic() - self.started)),
                "hosts": [{"host": h.name, "state": h.state, "reason": h.reason, "boot_seconds": round(h.boot_seconds, 1),
                           "pid": h.process.pid if h.process else None, "commands": len(h.clients)}
                          for h in self.hosts.values()],
                "ports": switch}

    async def op_link(self, request):
        h = self.host(request)
        network = request["network"]
        if network not in h.networks():
            raise HostDead(f"no network {network} in this bed ({', '.join(h.networks())})")
        words = request["set"]
        if request["carrier"]:
            await h.monitor("set_link", name=network, up="up" in words)
        await self.tell_switch(f"set {network}:{h.name} {request['direction']} {' '.join(words)}\n")
        return {"ok": True}

    async def op_kill(self, request):
        h = self.host(request)
        if not h.process or h.process.returncode is not None:
            raise HostDead(f"host {h.name} is not running" + (f": {h.reason}" if h.reason else ""))
        h.kill("killed by `testbed kill`")
        await h.process.wait()
        return {"ok": True}

    async def op_boot(self, request):
        h = self.host(request)
        if h.state not in ("dead", "off"):
            raise HostDead(f"host {h.name} is {h.state}")
        await h.start()
        return {"ok": True}

    async def op_down(self, _):
        self.over.set()
        return {"ok": True}


def main(folder):
    os.chdir(folder)
    os.umask(0o077)  # whoever reaches a socket here commands root in the guests
    with open("config.json", encoding="utf-8") as f:
        conf = json.load(f)
    signal.alarm(conf["lifetime"] + LIFETIME_GRACE_S)  # should the loop hang
    asyncio.run(Bed(conf).run())
    for name in glob.glob("*.sock") + glob.glob("*/*.sock") + ["pids"]:
        if os.path.exists(name):
            os.unlink(name)
