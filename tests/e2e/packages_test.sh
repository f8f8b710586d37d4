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
"$E2E_ROOT/scripts/deps" podman crun || exit 1
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
		modprobe -a --show-depends ib_uverbs rdma_ucm rdma_rxe crc32_generic nf_tables tun macvlan |
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
		ls -d /sys/fs/cgroup/migr-processes 2>/dev/null	# /migr is of the bundles that this test makes
		pgrep -xl migrd | sed "s/^[0-9]* /process /"
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
	on_sh host 'man -w migrctl migrd >/dev/null && man -w 8 migrd >/dev/null &&
		for page in getting-started operations limits failover threat-model; do man -w 7 migr-$page >/dev/null || exit 1; done && test -r /usr/share/bash-completion/completions/migrctl'
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

# podman finds our hook where the package has it, and gives it the annotation; those who know no such stage do not find it.
engine() {
	on_sh host '
		set -e
		[ -z "$(ls -A /usr/share/containers/oci/hooks.d 2>/dev/null)" ] || { echo "buildah and CRI-O refuse to run with our hook" >&2; exit 1; }
		b=/var/tmp/podman
		there() { find /run /etc /var/lib -xdev | sort; }
		there >/tmp/there
		"$1/scripts/make-bundle" $b/bundle --rdma none -- true	# its root: an empty one, for the host'\''s /usr
		run() {	# NAME OPTION.. -- CMD..
			local name=$1 options=()
			shift
			while [ "$1" != -- ]; do options+=("$1"); shift; done
			podman --hooks-dir /usr/lib/migr/hooks.d --root $b/lib --runroot $b/run --storage-driver vfs --cgroup-manager cgroupfs --events-backend file run --rm --name "$name" \
				--runtime "$runtime" --ulimit nofile=1024:1024 --network none --no-hosts --log-driver none --volume /usr:/usr:ro --volume /etc:/etc:ro "${options[@]}" \
				--rootfs $b/bundle/rootfs "${@:2}"
		}
		asks="grep -o libmigr.so /proc/self/maps; ibv_devinfo -d rxe0 | grep -o hca_id; test -c /dev/migr && test -S /run/migr/proc.sock && echo as asked"
		for runtime in runc crun; do
			said=$(run asks --annotation org.migr.rdma=uverbs0 -- sh -c "$asks" 2>&1) || { echo "$runtime: $said" >&2; exit 1; }
			for word in libmigr.so hca_id "as asked"; do grep -q "$word" <<<"$said" || { echo "$runtime: no $word: $said" >&2; exit 1; }; done
			! said=$(run silent -- sh -c "$asks" 2>&1) || { echo "$runtime: who has not asked got it: $said" >&2; exit 1; }
			! grep -qE "libmigr.so|hca_id" <<<"$said" || { echo "$runtime: who has not asked got some: $said" >&2; exit 1; }
			! said=$(run wrong --annotation org.migr.rdma=uverbs9 -- true 2>&1) || { echo "$runtime: ran without the device that it asked for" >&2; exit 1; }
			grep -q "OCI Hooks" <<<"$said" || { echo "$runtime: $said" >&2; exit 1; }
		done
		podman --root $b/lib --runroot $b/run --storage-driver vfs system reset --force >/dev/null 2>&1 || true
		rm -rf $b
		there | comm -13 /tmp/there - | tr "\n" "\0" | xargs -0 rm -rf	# what podman keeps for itself
	' "$E2E_ROOT"
}

# As docs/threat-model.md lists them.
capabilities() {
	on_sh host '
		set -e
		root=$1
		caps() { sed -n "s/^$1:\t0*\(.*\)/\1/p" /proc/$2/status; }
		# migrd: what its line says, of all that it could have.
		names=$(sed -n "/^| migrd itself |/s/|.*| \(.*\) | bundles.*/\1/p" "$root/docs/threat-model.md" | grep -o "\`[A-Z_]*\`" | tr -d "\`" | sed "s/^/cap_/" | tr "A-Z\n" "a-z,")
		p=$(pgrep -x migrd)
		[ "$(capsh --decode=$(caps CapEff $p) | cut -d= -f2 | tr , "\n" | sort | xargs)" = "$(tr , "\n" <<<"${names%,}" | sort | xargs)" ] || { echo "migrd has $(caps CapEff $p)" >&2; exit 1; }
		[ "$(caps CapBnd $p)" = "$(caps CapBnd 1)" ] || { echo "of the bounding set it has $(caps CapBnd $p)" >&2; exit 1; }
		# migrctl: one for what it asks the module itself, else none.
		for words in "peers --json" "recover --json"; do setpriv --bounding-set=-all migrctl $words >/dev/null; done
		setpriv --bounding-set=-all,+net_admin migrctl ps --json >/dev/null
		! setpriv --bounding-set=-all migrctl ps --json 2>/dev/null || { echo "migrctl ps works without NET_ADMIN" >&2; exit 1; }
		# migr-net: two, and not one of them alone.
		mkdir -p /tmp/net
		cat >/tmp/net/config.json <<-CONFIG
			{"annotations": {"org.migr.net.parent": "eth0", "org.migr.net.ip": "10.77.0.99/24", "org.migr.net.mac": "02:4d:00:00:00:63", "org.migr.net.netns": "migr-net"},
			 "linux": {"namespaces": [{"type": "network", "path": "/run/netns/migr-net"}]}}
		CONFIG
		net() {
			local step ok=0
			for step in prepare attach detach "attach --closed" open status detach cleanup; do
				setpriv --bounding-set="$1" /usr/lib/migr/migr-net $step /tmp/net migr-net >/tmp/net/out 2>&1 || { ok=1; echo "$1: $step: $(tail -n1 /tmp/net/out)"; break; }
			done
			/usr/lib/migr/migr-net cleanup /tmp/net migr-net
			return $ok
		}
		net -all,+net_admin,+sys_admin >&2
		! net -all,+net_admin || { echo "migr-net works without SYS_ADMIN" >&2; exit 1; }
		! net -all,+sys_admin || { echo "migr-net works without NET_ADMIN" >&2; exit 1; }
		rm -r /tmp/net
		umount /run/netns && rmdir /run/netns	# of ip
		# A container: none.
		b=/var/tmp/none
		"$root/scripts/make-bundle" $b --rdma none -- true
		python3 - $b/config.json <<-"EDIT"
			import json, sys
			config = json.load(open(sys.argv[1]))
			config["annotations"]["org.migr.rdma"] = "uverbs0"
			config["process"]["capabilities"] = {}
			config["process"]["args"] = ["sh", "-c", "grep -q libmigr.so /proc/self/maps && ibv_devinfo -d rxe0 && grep -E \"^Cap(Prm|Eff|Bnd):.*[1-9a-f]\" /proc/self/status || echo none"]
			json.dump(config, open(sys.argv[1], "w"))
		EDIT
		setpriv --bounding-set=-all /usr/lib/migr/migr-inject $b
		/usr/lib/migr/runc run --bundle $b none </dev/null >/tmp/none.log 2>&1 && grep -q hca_id /tmp/none.log && grep -qx none /tmp/none.log || { cat /tmp/none.log >&2; exit 1; }
		rm -rf $b
	' "$E2E_ROOT"
}
# An ordinary user's: two that are connected, with the library and without any capability. Only migrd has what moving them takes.
as_nobody() {
	on_sh host '
		set -e
		chmod 666 /dev/infiniband/uverbs0	# as udev does
		verify=$1/build/user/tests/programs/migr_verify store=/var/lib/nobody out=/tmp/nobody
		rm -rf $out && mkdir -m 777 $out
		flows() { local a; a=$(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts); sleep 1; [ "$(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts)" -gt $((a + 20)) ]; }
		flow() { for i in $(seq 60); do ! flows || return 0; done; echo "no traffic" >&2; cat $out/log >&2; exit 1; }
		none() { [ "$(sed -n "s/^Uid:\t\([0-9]*\).*/\1/p; s/^Cap[PEB][a-z]*:\t//p" /proc/$1/status | sort -u | xargs)" = "0000000000000000 65534" ] || { grep -E "^(Uid|Cap)" /proc/$1/status >&2; exit 1; }; }
		cd /
		setsid -f setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --no-new-privs env LD_PRELOAD=/usr/lib/migr/libmigr.so bash -c "
			\"\$@\" --json $out/b & b=\$!
			\"\$@\" --json $out/a --stop-file $out/stop 127.0.0.1
			wait \$b
		" bash "$verify" --dev rxe0 --stall 240 --mode mixed --qps 2 --rate 100 </dev/null >$out/log 2>&1
		sleep 1
		p=$(pgrep -o -u 65534 -x bash)
		flow
		none $p
		migrctl checkpoint $p $store >/dev/null
		! kill -0 $p 2>/dev/null
		migrctl restore $store >/dev/null
		flow
		none $p
		touch $out/stop
		for i in $(seq 60); do kill -0 $p 2>/dev/null || break; sleep 1; done
		cat $out/a $out/b | jq -es "length == 2 and all(.[]; .errors == 0 and .wr_posted == .wr_completed and .wr_posted > 0)" >/dev/null || { cat $out/a $out/b $out/log >&2; exit 1; }
		rm -rf $store $out
	' "$E2E_ROOT" && touch "$E2E_OUT/stored"
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
		mkdir -p /sys/fs/cgroup/migr-processes	# where migrd puts what it restores
		export DEBIAN_FRONTEND=noninteractive
		apt-get -q purge -y -o Dir::State::lists=/tmp/lists migr migr-dkms migr-runc migr-criu libmigr libmigr-dev >/tmp/apt.log 2>&1 ||
			{ tail -n 30 /tmp/apt.log >&2; exit 1; }
	'
}
nothing_left() {
	local d
	traces >"$E2E_OUT/after"
	# What was started here was stored: its numbers stay reserved, and the module with them. That has to be said.
	if [ -e "$E2E_OUT/stored" ]; then
		printf "%s\n" /dev/migr "module migr" | sort -u - "$E2E_OUT/before" -o "$E2E_OUT/before"
		on_sh host 'grep -q "^migr.ko is in use: it stays loaded" /tmp/apt.log' || fail "nothing says that the module stays"
	fi
	d=$(diff "$E2E_OUT/before" "$E2E_OUT/after") || { echo "$d" | head -n 40 >&2; fail "left behind"; }
}

rm -f "$E2E_OUT/stored"
prepare && traces >"$E2E_OUT/before" || exit 1
step "apt installs them" install || { e2e_end; }
step "modprobe ib_uverbs loads migr first" module_by_softdep
step "so does systemd's list" module_by_list
step "folders, and the distribution's runc in its place" folders
step "migrd by the line of its unit" daemon
step "migrctl asks it; manuals" asks
step "a container that asks by annotation, with migr's runc" container
step "a container of podman, which runs the OCI hook, with runc and with crun" engine
step "capabilities of each part" capabilities
step "an ordinary user's process without any is stored, and restored" as_nobody
step "CRIU finds the plugin; less than the unit gives is too little" criu_finds_plugin
step "apt purges them" purge
step "nothing is left" nothing_left
e2e_end
