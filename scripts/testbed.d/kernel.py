# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""Guest kernels: fetched and unpacked (never installed), their modules, the initramfs."""
import fcntl
import glob
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
import time

# What the guest needs before it can see its root; the rest is modprobed from there.
EARLY_MODULES = ["virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"]

KVM_TRIAL_S = 15


class KernelError(Exception):
    pass


class Kernel:
    """One version in the cache. `image` boots, `modules` is its lib/modules/VERSION."""

    def __init__(self, cache, version):
        self.version = version
        self.folder = os.path.join(cache, version)
        self.image = os.path.join(self.folder, "boot", "vmlinux-" + version)
        self.vmlinuz = os.path.join(self.folder, "boot", "vmlinuz-" + version)
        self.modules = os.path.join(self.folder, "lib", "modules", version)

    def ready(self):
        return os.path.exists(os.path.join(self.folder, "complete"))


def versions(root):
    """Those that there are: a bed needs one."""
    r = subprocess.run([os.path.join(root, "scripts", "kernel-versions")], capture_output=True, text=True, check=False)
    if not r.stdout:
        raise KernelError(r.stderr.strip() or "scripts/kernel-versions failed")
    return r.stdout.split()


def get(cache, version, say):
    """The kernel, from the cache or the distribution. A folder CACHE/VERSION with
    boot/vmlinuz-VERSION and lib/modules/VERSION put there by hand is taken as it is."""
    k = Kernel(cache, version)
    if k.ready():
        return k
    os.makedirs(k.folder, exist_ok=True)
    with open(os.path.join(k.folder, "lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another bed may be at it
        if k.ready():
            return k
        if not (os.path.exists(k.vmlinuz) and os.path.isdir(k.modules)):
            _unpack(k, say)
        _run(["depmod", "-b", k.folder, version], "depmod")
        _extract(k)
        with open(os.path.join(k.folder, "complete"), "w", encoding="ascii"):
            pass
    return k


def _run(argv, what, cwd=None):
    r = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if r.returncode:
        raise KernelError(f"{what}: {(r.stderr or r.stdout).strip()}")


def _unpack(k, say):
    say(f"fetching linux-image-{k.version} (unpacked below {k.folder}, not installed)")
    with tempfile.TemporaryDirectory(dir=k.folder) as t:
        _run(["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", "linux-image-" + k.version],
             f"cannot fetch linux-image-{k.version} (is it known? try: apt-get update)", cwd=t)
        package, = glob.glob(os.path.join(t, "*.deb"))
        _run(["dpkg-deb", "-x", package, k.folder], "dpkg-deb")
    lib = os.path.join(k.folder, "lib")
    if not os.path.exists(lib):  # merged-/usr packages
        os.symlink("usr/lib", lib)
    if not (os.path.exists(k.vmlinuz) and os.path.isdir(k.modules)):
        raise KernelError(f"linux-image-{k.version} holds no {k.vmlinuz} or no modules")


def _extract(k):
    """Writes the ELF image out of the bzImage: QEMU starts it directly (PVH), and
    the guest does not spend seconds under TCG to unpack itself."""
    with open(k.vmlinuz, "rb") as f:
        b = f.read()
    setup_sectors = b[0x1f1] or 4
    offset, length = struct.unpack_from("<II", b, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = b[start:start + length]
    try:
        if payload.startswith(b"\xfd7zXZ\0"):
            elf = lzma.LZMADecompressor().decompress(payload)
        elif payload.startswith(b"\x28\xb5\x2f\xfd"):
            elf = subprocess.run(["zstd", "-dc"], input=payload[:-4], capture_output=True, check=True).stdout
        else:
            elf = b""
    except (lzma.LZMAError, subprocess.CalledProcessError):
        elf = b""
    temporary = k.image + ".part"
    if elf.startswith(b"\x7fELF"):
        with open(temporary, "wb") as f:
            f.write(elf)
    else:  # as good, only slower to start
        shutil.copyfile(k.vmlinuz, temporary)
    os.replace(temporary, k.image)


def _load_order(k, names):
    """Paths of modules below lib/modules/VERSION, dependencies first; built-in ones left out."""
    dep, path_of = {}, {}

    def plain(path):
        return os.path.basename(path).split(".ko")[0].replace("-", "_")

    with open(os.path.join(k.modules, "modules.dep"), encoding="ascii") as f:
        for line in f:
            path, _, needs = line.partition(":")
            path_of[plain(path)] = path
            dep[path] = needs.split()
    with open(os.path.join(k.modules, "modules.builtin"), encoding="ascii") as f:
        builtin = {plain(line.strip()) for line in f}
    soft = {}
    with open(os.path.join(k.modules, "modules.softdep"), encoding="ascii") as f:
        for line in f:
            w = line.split()
            if len(w) > 3 and w[0] == "softdep" and w[2] == "pre:":
                soft[w[1].replace("-", "_")] = w[3:]
    order = []

    def add(path):
        if path in order:
            return
        for d in reversed(dep[path]):
            add(d)
        order.append(path)

    for name in names:
        for wanted in [*soft.get(name, []), name]:
            if wanted in path_of:
                add(path_of[wanted])
            elif wanted == name and name not in builtin:
                raise KernelError(f"kernel {k.version} has no module {name}")
    return order


def _module_bytes(path):
    with open(path, "rb") as f:
        b = f.read()
    if path.endswith(".xz"):
        return lzma.decompress(b)
    if path.endswith(".zst"):
        return subprocess.run(["zstd", "-dc"], input=b, capture_output=True, check=True).stdout
    return b


class _Cpio:
    def __init__(self, out):
        self.out, self.inode = out, 0

    def add(self, name, data=b"", mode=0o100644, rdev=(0, 0)):
        self.inode += 1
        name = name.encode() + b"\0"
        head = "070701" + "".join(f"{v:08X}" for v in (
            self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *rdev, len(name), 0))
        for part in (head.encode() + name, data):
            self.out.write(part + b"\0" * (-len(part) % 4))

    def close(self):
        self.add("TRAILER!!!", mode=0)


def write_initramfs(path, k, root, agent, conf):
    """@param conf: text of /bed.conf, shell assignments"""
    busybox = shutil.which("busybox") or "/bin/busybox"
    tests = os.path.join(root, "tests", "testbed")
    with open(path, "wb") as f:
        c = _Cpio(f)
        for d in ("bin", "proc", "sys", "dev", "modules"):
            c.add(d, mode=0o040755)
        c.add("dev/console", mode=0o020600, rdev=(5, 1))

        def copy(source, name, mode):
            with open(source, "rb") as s:
                c.add(name, s.read(), 0o100000 | mode)

        copy(busybox, "bin/busybox", 0o755)
        for applet in ("sh", "mount", "insmod", "uname", "mkdir", "cp", "ln", "cat", "poweroff", "switch_root"):
            c.add("bin/" + applet, b"busybox", 0o120777)
        copy(agent, "guest-agent", 0o755)
        copy(os.path.join(tests, "guest-init"), "init", 0o755)
        copy(os.path.join(tests, "guest-setup"), "guest-setup", 0o755)
        c.add("bed.conf", conf.encode())
        order = _load_order(k, EARLY_MODULES)
        names = [os.path.basename(p).split(".ko")[0] + ".ko" for p in order]
        for p, name in zip(order, names):
            c.add("modules/" + name, _module_bytes(os.path.join(k.modules, p)))
        c.add("modules/order", "".join(n + "\n" for n in names).encode())
        c.close()


def accelerator(cache, k, initramfs, say):
    """"kvm" if a guest really boots with it, else "tcg". /dev/kvm may exist and yet
    abort or hang, so it is tried once per start of this machine, kernel and QEMU."""
    forced = os.environ.get("MIGR_ACCEL")
    if forced in ("kvm", "tcg"):
        return forced
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        boot = f.read().strip()
    qemu = os.stat(os.path.realpath(shutil.which("qemu-system-x86_64") or "/")).st_mtime_ns
    key = f"{boot} {qemu} {k.version}"
    known = os.path.join(cache, "accel")
    with open(known, "a+", encoding="ascii") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        for line in f:
            # Where one kernel cannot run, another is not worth the wait.
            if line.startswith(key + ": ") or line.startswith(f"{boot} {qemu} ") and line.endswith(": tcg\n"):
                return line.split(": ")[1].strip()
        say(f"trying KVM (at most {KVM_TRIAL_S} s, once)")
        result = "kvm" if _kvm_boots(k, initramfs) else "tcg"
        f.write(f"{key}: {result}\n")
    say("KVM works" if result == "kvm" else "KVM does not run a guest here; using TCG")
    return result


def _kvm_boots(k, initramfs):
    argv = ["timeout", "-s", "KILL", str(KVM_TRIAL_S), "qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m",
            "512", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel",
            k.image, "-initrd", initramfs, "-append", "console=ttyS0 panic=-1 quiet tb.trial"]
    t0 = time.monotonic()
    r = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return b"trial boot reached user space" in r.stdout and time.monotonic() - t0 < KVM_TRIAL_S
