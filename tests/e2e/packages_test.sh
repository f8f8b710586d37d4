#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# The Debian packages on a host of their own: installed, used as their files say, purged without a trace.
#
# The host's kernel is the distribution's, its user space this machine's, on which everything that the packages depend on is
# installed. Nothing of migr is loaded or set up by the testbed. There is no systemd: migrd is started by the ExecStart line
# of its unit; whether the dependencies are complete, and the module's build for other kernels, shows tests/packages/root_test.
set -uo pipefail
export MIGR_BED=${MIGR_PACKAGES_BED:-packages} E2E_WITH=host E2E_LIMIT=${E2E_LIMIT:-240}
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
DEBS=$E2E_ROOT/build/packages
KVER=$(e2e_kernel) || exit 1
ls "$DEBS"/migr_*.deb >/dev/null 2>&1 || { fail "no packages; run: make packages"; exit 1; }
trap 'testbed down' EXIT
testbed up --hosts host --rails 1 --no-rdma --mem 1024 --lifetime 1500 --kernel "$KVER" || exit 1

# depmod reads every module there is and mandb every manual, which takes this host minutes: it keeps the modules that it needs
# and no index of manuals. Headers belong to a kernel
# that is installed, as this one is for the host; DKMS would build for others, too.
prepare() {
	on_sh host '
		set -e
		rm -rf /var/lib/migr /etc/migr	# of a migr that this machine has had
		cd "/lib/modules/$(uname -r)"
		mkdir /tmp/keep
		modprobe -a --show-depends ib_uverbs rdma_ucm rdma_rxe crc32_generic nf_tables tun |
			sed -n "s|^insmod $PWD/\([^ ]*\).*|\1|p" | sort -u | xargs cp --parents -t /tmp/keep
		for d in kernel /lib/modules/*; do
			[ "$d" = "$PWD" ] || mount -t tmpfs none "$d"
		done
		cp -r /tmp/keep/kernel .
		ln -sfn "/usr/src/linux-headers-$(uname -r)" build
		depmod
		rm -f /var/lib/man-db/auto-update
	'
}

# A line for everything that packages could leave: names of files, the module, what runs. Not what is of others: criu.kdat (what
# CRIU has found out about the kernel), the folder that every runc has its containers in, the key that DKMS makes once and keeps.
traces() {
	on_sh host '
		find /etc /run /opt /srv /var/lib /var/spool "/lib/modules/$(uname -r)" -xdev \
			\( -path /var/lib/dpkg -o -path /var/lib/apt -o -path /run/testbed -o -path /run/criu.kdat -o -path /run/runc -o -path "/var/lib/dkms/mok.*" \) -prune -o -print
		find /usr/src /usr/lib /usr/lib/criu /usr/bin /usr/sbin /usr/lib/modprobe.d /usr/lib/tmpfiles.d /usr/lib/modules-load.d \
			/usr/lib/systemd/system /usr/share/containers /usr/share/bash-completion/completions /usr/share/man/man1 \
			/usr/share/man/man8 -maxdepth 1 2>/dev/null
		ls -d /usr/share/doc/*migr* /usr/include/migr 2>/dev/null
		cut -d" " -f1 /proc/modules | grep -x migr | sed "s/^/module /"
		ls /dev/migr 2>/dev/null
		pgrep -xl migrd | sed "s/^[0-9]* /process /"
		ls -d /sys/fs/cgroup/migr* 2>/dev/null
		dpkg-query -W -f "\${Package} \${Status}\n" | grep migr
		true
	' | sort -u
}

install() {
	# The module is built natively, from the package, and comes as a tarball of DKMS: an emulated processor needs five
	# minutes for the compiler. MIGR_DKMS_IN_GUEST=1: that is done, too.
	local tar=$E2E_OUT/dkms.tar.gz
	if [ -z "${MIGR_DKMS_IN_GUEST:-}" ]; then
		[ "$tar" -nt "$(ls "$DEBS"/migr-dkms_*.deb)" ] || "$E2E_ROOT/tests/packages/dkms_build" "$KVER" --tarball "$tar" || return 1
		testbed put host "$tar" /root/ || return 1
	fi
	E2E_LIMIT=900 on_sh host '
		set -e
		if [ -e /root/dkms.tar.gz ]; then	# where the script of DKMS looks for it
			mkdir -p /usr/share/migr-dkms
			cp /root/dkms.tar.gz "/usr/share/migr-dkms/migr-$2.dkms.tar.gz"
		fi
		mkdir -p /tmp/lists/partial
		export DEBIAN_FRONTEND=noninteractive
		apt-get -q install -y --no-install-recommends -o Dir::State::lists=/tmp/lists "$1"/*.deb >/tmp/apt.log 2>&1 ||
			{ tail -n 30 /tmp/apt.log >&2; exit 1; }
		rm -rf /usr/share/migr-dkms /root/dkms.tar.gz
		dpkg --audit
	' "$DEBS" "$VERSION"
}
VERSION=$(dpkg-deb -f "$DEBS"/migr_*.deb Version)

module_by_softdep() {
	on_sh host '
		set -e
		dkms status -m migr | grep -q "installed$"
		case $(modinfo -n migr) in */updates/dkms/migr.ko*) ;; *) echo "migr is $(modinfo -n migr)" >&2; exit 1 ;; esac
		! grep -q "^migr " /proc/modules
		modprobe -a ib_uverbs rdma_ucm rdma_rxe
		grep -q "^migr " /proc/modules || { echo "modprobe ib_uverbs did not load migr" >&2; exit 1; }
		rdma link add rxe0 type rxe netdev eth1
	'
}
module_by_list() {	# what systemd does at the start
	on_sh host 'set -e; rmmod migr; /lib/systemd/systemd-modules-load; grep -q "^migr " /proc/modules; ls /dev/migr'
}

folders() {
	same "folders" "700 /etc/migr
755 /run/migr
700 /run/migrd
700 /var/lib/migr" "$(on host stat -c '%a %n' /etc/migr /run/migr /run/migrd /var/lib/migr)" &&
		same "distribution's runc" runc "$(on_sh host 'dpkg -S "$(readlink -f "$(command -v runc)")" | cut -d: -f1')"
}
same() { [ "$2" = "$3" ] || fail "$1: '$3', not '$2'"; }

daemon() {	# as migr's README.Debian says
	on_sh host '
		set -e
		migrctl pki init /etc/migr/ca >/dev/null
		migrctl pki host /etc/migr/ca host --ip 10.77.0.1 >/dev/null
		mkdir /etc/migr/pki
		cp /etc/migr/ca/host/* /etc/migr/pki/
		rm -r /etc/migr/ca
		sed "s/hostA/host/; s/10.0.0.1/10.77.0.1/" /usr/share/doc/migr/examples/migrd.json >/etc/migr/migrd.json
		unit=/lib/systemd/system/migrd.service
		for f in $(sed -n "s/^ConditionPathExists=//p" $unit); do [ -e "$f" ]; done
		start=$(sed -n "s/^ExecStart=//p" $unit)
		exec setsid -f $start </dev/null >>/mnt/out/migrd.log 2>&1
	' && until_true 60 on host test -S /run/migrd/ctl.sock ||
		{ cat "$E2E_ROOT/build/testbed/$MIGR_BED/host/out/migrd.log" >&2; fail "no migrd"; }
}
asks() {
	local v
	v=$(on host migrctl version --json) && jq -e '.migrctl.abi == .module.abi and .migrd.release == .migrctl.release and .module.devices == 1' \
		<<<"$v" >/dev/null || fail "migrctl version: $v" || return 1
	on host migrctl peers --json | jq -e '.[0].name == "host"' >/dev/null || fail "migrctl peers" || return 1
	on_sh host 'man -w migrctl migrd >/dev/null && man -w 8 migrd >/dev/null && test -r /usr/share/bash-completion/completions/migrctl'
}

container() {	# by its annotation, with the patched runc: the device answers, through the library
	on_sh host '
		set -e
		b=/var/tmp/bundle
		"$1/scripts/make-bundle" $b --rdma none -- sh -c "grep libmigr.so /proc/self/maps && ibv_devinfo -d rxe0 &&
			test -c /dev/migr && test -S /run/migr/proc.sock && echo as asked"
		# Its output is that of runc.
		python3 - $b/config.json <<-"EDIT"
			import json, sys
			config = json.load(open(sys.argv[1]))
			config["annotations"]["org.migr.rdma"] = "uverbs0"
			config["process"]["args"] = config["process"]["args"][4:]
			json.dump(config, open(sys.argv[1], "w"))
		EDIT
		/usr/lib/migr/migr-inject $b
		/usr/lib/migr/runc run --bundle $b asked </dev/null >/tmp/asked.log 2>&1 || { cat /tmp/asked.log >&2; exit 1; }
		grep -q "as asked" /tmp/asked.log
		/usr/lib/migr/runc partial-restore --help | grep -q full-restore
		rm -rf $b
	' "$E2E_ROOT"
}

# CRIU finds the plugin by itself; and why the unit leaves open what it leaves open.
criu_finds_plugin() {
	on_sh host '
		set -e
		mkdir -p /var/tmp/c
		cd /var/tmp/c
		setsid -f sleep 1000 </dev/null >/dev/null 2>&1
		p=$(pgrep -nx sleep)
		opt="-D . --shell-job --manage-cgroups=ignore -v4"
		again() { kill -KILL $p 2>/dev/null || true; while kill -0 $p 2>/dev/null; do sleep 0.1; done; }
		criu dump -t $p --leave-running $opt -o dump.log
		grep -q "migr_plugin" dump.log || { grep -i plugin dump.log >&2; echo "CRIU has not loaded the plugin" >&2; exit 1; }
		again
		criu restore -d $opt -o restore.log
		again
		! setpriv --bounding-set -sys_boot criu restore -d $opt -o less.log || { echo "restored with a capability less" >&2; exit 1; }
		again
		setpriv --no-new-privs criu restore -d $opt -o nnp.log
		grep -q "^NoNewPrivs:.*1" /proc/$p/status || { echo "no_new_privs was not inherited" >&2; exit 1; }
		mkdir ns
		! unshare --mount criu dump -t $p --leave-running -D ns --shell-job --manage-cgroups=ignore -v4 -o dump.log ||
			{ echo "dumped from another mount namespace" >&2; exit 1; }
		again
		cd /
		rm -rf /var/tmp/c
	'
}

purge() {
	E2E_LIMIT=600 on_sh host '
		set -e
		pkill -TERM -x migrd
		for i in $(seq 100); do pgrep -x migrd >/dev/null || break; sleep 0.1; done
		export DEBIAN_FRONTEND=noninteractive
		apt-get -q purge -y -o Dir::State::lists=/tmp/lists migr migr-dkms migr-runc migr-criu libmigr libmigr-dev >/tmp/apt.log 2>&1 ||
			{ tail -n 30 /tmp/apt.log >&2; exit 1; }
	'
}
nothing_left() {
	local d
	traces >"$E2E_OUT/after"
	d=$(diff "$E2E_OUT/before" "$E2E_OUT/after") || { echo "$d" | head -n 40 >&2; fail "left behind"; }
}

prepare && traces >"$E2E_OUT/before" || exit 1
step "apt installs them" install || { e2e_end; }
step "modprobe ib_uverbs loads migr first" module_by_softdep
step "so does systemd's list" module_by_list
step "folders, and the distribution's runc in its place" folders
step "migrd by the line of its unit" daemon
step "migrctl asks it; manuals" asks
step "a container that asks by annotation, with migr's runc" container
step "CRIU finds the plugin; less than the unit gives is too little" criu_finds_plugin
step "apt purges them" purge
step "nothing is left" nothing_left
e2e_end
		mkdir -p /sys/fs/cgroup/migr-processes	# where migrd puts what it restores
