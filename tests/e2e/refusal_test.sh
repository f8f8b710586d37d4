#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Migrations that cannot be: each is refused with one clear line, and the container goes on as if nothing had been asked.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
E2E_RATE=100	# that it goes on is all that is looked at

untouched() { expect_running c src && expect_traffic; }

no_such_container() {
	local status=0
	on src migrctl migrate nobody --to dst --json >"$E2E_OUT/refused.json" 2>"$E2E_OUT/refused.err" || status=$?
	[ $status = 3 ] || fail "status $status, want 3 (refused)" || return 1
	grep -q nobody "$E2E_OUT/refused.err" || { cat "$E2E_OUT/refused.err" >&2; fail "the error does not name the container"; }
}
refused_with() { jq -e --arg code "$1" '.code == $code and .from == "src"' "$E2E_OUT/refused.json" >/dev/null || { cat "$E2E_OUT/refused.json" >&2; fail "the code is not $1"; }; }
no_such_host() { migrate_refused c nowhere 'nowhere' && refused_with ENOENT && untouched; }
itself() { migrate_refused c src 'src' && refused_with EINVAL && untouched; }
destination_silent() {
	migrd_kill dst KILL || return 1
	migrate_refused c dst 'dst' && refused_with EHOSTUNREACH && untouched &&
		doctor_says 1 '[.[] | select(.status == "failed")] | length == 1 and .[0].check == "dst: migrd" and (.[0].advice | test("start it on dst"))' --peer dst --peer peer
	local r=$?
	migrd_start dst && return $r
}
destination_without_module() {
	migrd_kill dst TERM && on dst rmmod migr && migrd_start dst || return 1
	migrate_refused c dst 'migr\.ko|module' && untouched &&
		doctor_says 1 '[.[] | select(.status == "failed")] | length == 1 and .[0].check == "dst: module" and (.[0].found | test("not loaded"))' --peer dst
	local r=$?
	migrd_kill dst TERM && host_setup dst && return $r
}
ordinary_user() {
	local status=0
	on src setpriv --reuid 65534 --regid 65534 --clear-groups "$E2E_ROOT/build/user/agent/migrctl" migrate c --to dst \
		>"$E2E_OUT/refused.json" 2>"$E2E_OUT/refused.err" || status=$?
	[ $status = 3 ] || fail "status $status, want 3 (refused)" || return 1
	grep -qi root "$E2E_OUT/refused.err" || { cat "$E2E_OUT/refused.err" >&2; fail "the error does not say that root is needed"; } || return 1
	untouched
}
no_libmigr() {
	# A partner of its own, on another port; without traffic, as an RDMA process is enough.
	start_peer plain "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --port 18600 || return 1
	CONTAINER_IP=10.77.0.102 CONTAINER_ENV=none start_container src plain "$E2E_LIB/migr_verify" --dev rxe0 --rate 100 \
		--port 18600 --stop-file /tmp/stop "$E2E_PEER" || return 1
	until_true 30 on_sh src 'rdma res show qp | grep -q "type RC.*comm migr_verify"' || return 1
	sleep 1
	migrate_refused plain dst 'libmigr' && expect_running plain src || return 1
	container_exec src plain touch /tmp/stop && container_wait src plain 60 && peer_wait plain 60 && container_remove src plain &&
		untouched
}
only_checked() {
	jq -e '.migrated == false and (.phases_ms | keys == ["check"])' "$E2E_OUT/refused.json" >/dev/null ||
		{ cat "$E2E_OUT/refused.json" >&2; fail "more was done than to check"; }
}
# A container whose program also has an object of a kind that does not move.
holds() {	# KIND WORDS
	start_verify src "h-$1" --hold "$1" --mode send || return 1
	migrate_refused "h-$1" dst "$2" && only_checked && expect_running "h-$1" src && expect_traffic && stop_verify "h-$1" || { e2e_logs; e2e_reset; return 1; }
}
# The connection works, but cannot follow: only one end has virtual names.
partner_without_libmigr() {
	PEER_ENV=none start_peer plain "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --port 18601 --status /tmp/plain.status || return 1
	CONTAINER_IP=10.77.0.103 start_container src half "$E2E_LIB/migr_verify" --dev rxe0 --mode mixed --rate 200 \
		--port 18601 --stop-file /tmp/stop "$E2E_PEER" || return 1
	plain_bytes() { on peer jq -r .bytes /tmp/plain.status; }
	until_true 30 eval '[ "$(plain_bytes)" -gt 0 ]' || { fail "no traffic"; return 1; }
	migrate_refused half dst 'process [0-9]+ \(migr_verify\) on peer, does not use libmigr.*LD_PRELOAD' || return 1
	only_checked || return 1
	local before
	before=$(plain_bytes)
	until_true 10 eval "[ \"\$(plain_bytes)\" -gt $before ]" || { fail "the traffic has stopped"; return 1; }
	expect_running half src && container_exec src half touch /tmp/stop && container_wait src half 60 && peer_wait plain 60 &&
		container_remove src half && untouched
}
# with_host HOST DO UNDO PATTERN: a migration while HOST is as DO makes it is refused before anything is touched.
with_host() {
	local r=1
	on_sh "$1" "$2" && sleep 1 && migrate_refused c dst "$4" && only_checked && r=0
	on_sh "$1" "$3" && [ $r = 0 ] && untouched
}
# The same, but only seen when files are written: it goes back.
undone_with_host() {
	local r=1
	on_sh "$1" "$2" && migrate_refused c dst "$4" 1 && r=0
	jq -e '.phases_ms | has("rollback")' "$E2E_OUT/refused.json" >/dev/null || { cat "$E2E_OUT/refused.json" >&2; fail "nothing was undone"; r=1; }
	on_sh "$1" "$3" && [ $r = 0 ] && untouched
}
# And that before the container is stopped.
never_stopped() {
	undone_with_host "$@" && { jq -e '.phases_ms | has("prepare") and (has("suspend") | not)' "$E2E_OUT/refused.json" >/dev/null ||
		{ cat "$E2E_OUT/refused.json" >&2; fail "it was stopped"; }; }
}
# Of bytes there are enough, of files not: what only the disk itself can tell.
few_files() { echo "mkdir -p $1 && mount -t tmpfs -o size=512m,nr_inodes=$2 none $1"; }
small_disk() { echo "mkdir -p $1 && mount -t tmpfs -o size=256k none $1"; }
# dry_run STATUS TO FILTER
dry_run() {
	local status=0
	on src migrctl migrate c --to "$2" --dry-run --json >"$E2E_OUT/plan.json" 2>"$E2E_OUT/plan.err" || status=$?
	[ $status = "$1" ] && jq -e "$3" "$E2E_OUT/plan.json" >/dev/null || { cat "$E2E_OUT"/plan.* >&2; fail "a dry run ended with status $status, or does not say $3"; }
}
only_asked() {
	on src migrctl ps --json | jq -e 'any(.[]; .container == "c")' >/dev/null || fail "migrctl ps does not know the container" || return 1
	dry_run 0 dst '.would_move and .resources.qp == 2 and .connections == 2 and .partners == ["peer"] and .memory_bytes > 0 and has("expected_stop_ms")' &&
		dry_run 3 nowhere '.would_move == false and .code == "ENOENT" and (.refused_because | test("nowhere"))' && untouched
}
wrong_arguments() {
	local status=0
	on src migrctl migrate c >"$E2E_OUT/refused.json" 2>"$E2E_OUT/refused.err" || status=$?
	[ $status = 2 ] || fail "status $status of a bad command line, want 2"
}

# migrd takes peers and their rights from its configuration while it runs.
configured() {	# HOST FILTER: of jq, for its migrd.json
	on_sh "$1" 'cp /etc/migr/migrd.json /tmp/config.saved && jq "$1" /tmp/config.saved >/etc/migr/migrd.json' "$2" && on "$1" migrctl reload >&2
}
configured_as_before() { on_sh "$1" 'cp /tmp/config.saved /etc/migr/migrd.json' && on "$1" migrctl reload >&2; }
peer_has_left() {
	local r=1
	configured src '.peers |= map(select(.name != "dst"))' && migrate_refused c dst "no host 'dst' among the peers in the configuration" && r=0
	configured_as_before src && [ $r = 0 ] || return 1
	on src migrctl peers --json | jq -e 'any(.[]; .name == "dst" and .answers)' >/dev/null || fail "dst is a peer again, and does not answer" || return 1
	untouched
}
# "allow" has others only, or other names. The log of the host that refuses says so, too, with the number that migrctl has.
not_allowed() {	# HOST ALLOW KEY
	local id r=1
	configured "$1" ".allow = $2" &&
		migrate_refused c dst "may not take 'c' from here|may not move 'c' to here" && grep -qF "\"$3\": ..} in migrd.json of $1" "$E2E_OUT/refused.err" && r=0
	[ $r = 0 ] || { cat "$E2E_OUT/refused.err" >&2; fail "allow $2 on $1"; }
	jq -e '.status == 3 and .code == "EPERM" and .error == .rollback_reason and .migrated == false and (.phases_ms | keys - ["check"] == [])' "$E2E_OUT/refused.json" >/dev/null ||
		{ cat "$E2E_OUT/refused.json" >&2; fail "more was done than to check"; r=1; }
	id=$(jq -r .id "$E2E_OUT/refused.json")
	grep "migration=$id .*refused: .*$3" "$E2E_ROOT/build/testbed/$MIGR_BED/$1/out/migrd.log" >&2 || { fail "the log of $1 says nothing of migration $id"; r=1; }
	configured_as_before "$1" && [ $r = 0 ] && untouched
}

step "traffic" start_verify src c --mode mixed --qps 2 || { e2e_logs; e2e_end; }
step "a dry run" only_asked
step "a container that does not exist" no_such_container
step "a host that is no peer" no_such_host
step "a peer that has left" peer_has_left
step "to where it is" itself
step "a destination that does not answer" destination_silent
walk_step "a destination without the module" destination_without_module
step "an ordinary user" ordinary_user
walk_step "a host that may move another one to there" not_allowed dst '{"to_here": ["peer", {"peer": "src", "containers": ["web-*"]}]}' to_here
step "a host that it may not be moved to" not_allowed src '{"from_here": ["peer"]}' from_here
step "a process without libmigr" no_libmigr
walk_step "a partner without libmigr" partner_without_libmigr
step "a bad command line" wrong_arguments
# shellcheck disable=SC2016
walk_step "a smaller MTU there" with_host dst 'cat /sys/class/net/eth1/mtu >/tmp/mtu; ip link set eth1 mtu 576' 'ip link set eth1 mtu "$(cat /tmp/mtu)"' \
	'dst: .*an MTU of [0-9]+ on port 1 \(QP [0-9]+\), which has 256'
walk_step "the rail is down there" with_host dst 'ip link set eth1 down' 'ip link set eth1 up' 'dst: .*an active port 1 \(QP [0-9]+\): it is down'
# shellcheck disable=SC2016
step "no GID of its family there" with_host dst 'ip -4 -o addr show dev eth1 | awk "{print \$4}" >/tmp/address; ip -4 addr flush dev eth1' 'ip addr add "$(cat /tmp/address)" brd + dev eth1' \
	'dst: .*a RoCE v2 GID of the family IPv4 on port 1 \(QP [0-9]+\): give its interface an address'
walk_step "too few RDMA objects for its cgroup there" never_stopped dst \
	'mkdir -p /sys/fs/cgroup/migr && echo +rdma >/sys/fs/cgroup/cgroup.subtree_control && echo "rxe0 hca_object=4" >/sys/fs/cgroup/migr/rdma.max' \
	'echo "rxe0 hca_object=max" >/sys/fs/cgroup/migr/rdma.max' 'rdma\.max'
walk_step "a processor there that lacks what the one here has" with_host dst 'sed "s/ sse4_2\b//" /proc/cpuinfo >/tmp/cpuinfo; mount --bind /tmp/cpuinfo /proc/cpuinfo' 'umount /proc/cpuinfo' \
	'dst: its processor lacks what programs may have found where they run now: sse4_2;'
walk_step "too little memory there" with_host dst 'echo "MemAvailable: 1000 kB" >/tmp/meminfo; mount --bind /tmp/meminfo /proc/meminfo' 'umount /proc/meminfo' \
	'dst: .*has filled [0-9]+ MB of memory, and 1 MB are free here'
walk_step "a disk in memory here" with_host src 'echo "MemAvailable: 1000 kB" >/tmp/meminfo; mount --bind /tmp/meminfo /proc/meminfo' 'umount /proc/meminfo' \
	'migr(/source)? is in memory, of which 1 MB are free'
step "a small disk there" with_host dst "$(small_disk /var/lib/migr/dest)" 'umount /var/lib/migr/dest' 'dst: .*and 1 MB are free in /var/lib/migr/dest'
walk_step "a small disk here" with_host src "$(small_disk /var/lib/migr/source)" 'umount /var/lib/migr/source' 'and 1 MB are free in /var/lib/migr/source'
step "a bundle larger than what is copied" with_host src "truncate -s 2G $E2E_BUNDLES/c/large" "rm $E2E_BUNDLES/c/large" 'has 2[0-9]+ MB of files, and at most 1024 MB are copied'
walk_step "the disk there fills up" undone_with_host dst "$(few_files /var/lib/migr/dest 24)" 'umount /var/lib/migr/dest' 'No space left on device'
step "the disk here fills up" undone_with_host src "$(few_files /var/lib/migr/source 24)" 'umount /var/lib/migr/source' 'No space left on device'
roce_closed() { echo "iptables -$1 INPUT -p udp --dport 4791 ${2:-} -j DROP"; }
step "RoCE is closed there" never_stopped dst "$(roce_closed I)" "$(roce_closed D)" 'dst does not reach peer over RDMA, as src does: [0-9]+ bytes at once between .*UDP port 4791'
walk_step "only small packets of RoCE come to there" never_stopped dst "$(roce_closed I '-m length --length 1000:')" "$(roce_closed D '-m length --length 1000:')" 'dst does not reach peer over RDMA'
doctor_sees_it_closed() {
	local r=0
	on_sh dst "$(roce_closed I)" && doctor_says 1 '[.[] | select(.status == "failed")] | length == 2 and all(.[]; (.check | test("^dst: path rxe")) and (.advice | test("4791")))' --peer dst || r=1
	on_sh dst "$(roce_closed D)" && [ $r = 0 ] && doctor_says 0 'any(.[]; .check == "dst: path rxe0/1" and (.found | test("passes both ways")))' --peer dst && untouched
}
walk_step "doctor sees that RoCE is closed there" doctor_sees_it_closed
step "after all that both ends agree" stop_verify c || e2e_reset
walk_step "a QP in SQD" holds sqd 'process [0-9]+ \(migr_verify\): QP [0-9]+ is in state SQD and cannot be migrated'
walk_step "registered memory that was made read-only" holds readonly 'memory of 4096 bytes is registered, and not mapped or not writable any more'
walk_step "a process with librdmacm" holds cm "librdmacm"
e2e_end
