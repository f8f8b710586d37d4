#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Services of other shapes than one process with resources that stay: several processes, resources that come and go.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

moved() {	# OPTION...: src to dst
	start_verify src shape "$@" && migrate_ok shape dst && expect_traffic && stop_verify shape || { e2e_logs; e2e_reset; return 1; }
}
# Two of the container's own, and one that was started in it with runc exec. In the background that is a child of the first
# process, and moves along; in the foreground it is not, cannot, and is named.
exec_failed() { container_exec "$(container_host shape)" shape cat /tmp/exec.log >&2; peer_log exec >&2; e2e_logs; e2e_reset; fail "$*"; }
# scope in|out: the first process moves on to a group below the container's, as systemd does, where nothing of runc exec comes; or back.
scope() {
	on_sh src 'p=$("$1/runc" state shape | jq .pid) && group=/sys/fs/cgroup$(sed -n s/^0:://p "/proc/$p/cgroup") && case $2 in
		in) mkdir "$group/init.scope" && echo "$p" >"$group/init.scope/cgroup.procs" ;;
		out) echo "$p" >"${group%/init.scope}/cgroup.procs" && rmdir "$group" ;;
		esac' "$E2E_LIB" "$1"
}
exec_moves() { local x; x=$(on peer jq -r .bytes /tmp/exec.status) && sleep 1 && [ "$(on peer jq -r .bytes /tmp/exec.status)" -gt "$x" ]; }
several_processes() {
	local VERIFY_PROCESSES=2
	start_verify src shape "$@" && start_peer exec "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --stall 240 --port 18600 --status /tmp/exec.status || return 1
	# shellcheck disable=SC2016
	container_exec src shape bash -c 'LD_PRELOAD=$1/libmigr.so setsid -f "${@:2}" </dev/null >/tmp/exec.log 2>&1' bash "$E2E_LIB" \
		"$E2E_LIB/migr_verify" --dev rxe0 --stall 240 --rate 100 --port 18600 --stop-file /tmp/exec.stop "$@" "$E2E_PEER" &&
		until_true 60 exec_moves || { exec_failed "no traffic of what was started with runc exec"; return 1; }
	# shellcheck disable=SC2016
	scope in && on_sh src '"$1/runc" exec -d shape tail -f /dev/null </dev/null >/dev/null 2>&1' "$E2E_LIB" &&
		migrate_refused shape dst "process [0-9]+ \\(tail\\) was started in 'shape' with runc exec" && expect_running shape src && on src pkill -x tail && scope out ||
		{ exec_failed "a program in the foreground"; return 1; }
	migrate_ok shape dst && until_true 30 exec_moves && expect_traffic && container_exec dst shape touch /tmp/exec.stop && peer_wait exec 120 &&
		until_true 30 container_exec dst shape grep -q '^{' /tmp/exec.log &&
		container_exec dst shape grep '^{' /tmp/exec.log | jq -e '.errors == 0 and .wr_posted == .wr_completed and .wr_posted > 0' >/dev/null &&
		stop_verify shape || exec_failed "what was started with runc exec did not move along"
}
# The record never holds still: two tries find that out before anything is stopped, the third makes such calls wait.
churn() {
	moved --churn 20 "$@" &&
		{ jq -e '.tries == 3' "$E2E_OUT/migrate.json" >/dev/null || { cat "$E2E_OUT/migrate.json" >&2; fail "it was not tried three times"; }; } &&
		{ jq -es 'all(.[]; .churn_rounds > 20)' "$E2E_OUT/shape.container.json" >/dev/null || fail "too few resources were made"; }
}

# Memory that the NIC writes all the while: what the copy made ahead has of it is old when the container stops.
memory_ahead() {
	MIGRATE_OPTIONS=--pre-copy moved --mode mixed --qps 2 --size 16384 --depth 32 &&
		{ jq -e '.bytes_pre_copied > 3e6 and .phases_ms["pre-copy"] > 0' "$E2E_OUT/migrate.json" >/dev/null ||
			{ cat "$E2E_OUT/migrate.json" >&2; fail "no memory was copied ahead of the stop"; }; }
}

# A program in the foreground that begins when the container was looked at already.
started_late() {	# GATE
	migrate_refused late dst "process [0-9]+ \\(tail\\) was started in 'late' with runc exec" 1 &
	local pid=$!
	# shellcheck disable=SC2016
	until_true 60 on src test -e "$1" && on_sh src '"$1/runc" exec -d late tail -f /dev/null </dev/null >/dev/null 2>&1' "$E2E_LIB" && on src rm -f "$1" &&
		wait $pid && expect_running late src && on src pkill -x tail && expect_traffic || fail "a program that was started beside it meanwhile"
}
# stood_still ID: what it wrote to on src is there what dst went on from.
stood_still() {
	local file=$E2E_BUNDLES/$1/rootfs/srv/ticks n
	n=$(on src stat -c %s "$file") && [ "$n" -gt 0 ] && [ "$(on src md5sum "$file" | cut -c1-32)" = "$(on_sh dst 'head -c "$1" "$2" | md5sum | cut -c1-32' "$n" "$file")" ] ||
		fail "a process of it has run on src after it was frozen"
}

# What changes in its root filesystem when that was copied already, and it still runs.
written_late() {
	local gate=/tmp/connected pid ok=0 ticks='exec >/dev/null 2>&1 </dev/null; mkfifo /tmp/f; exec 3<>/tmp/f; while :; do echo $EPOCHREALTIME >>/srv/ticks; read -rt 0.002 _ <&3; done'
	CONTAINER_WRITABLE=1 start_verify src late "$@" && container_exec src late touch /srv/gone &&
		container_exec src late setsid -f bash -c "$ticks" && migrd_restart src "MIGR_FAULT=source.connect.end:while=$gate" ||
		{ e2e_logs; e2e_reset; return 1; }
	[ -z "${E2E_WALK:-}" ] || started_late $gate || { e2e_logs; e2e_reset; return 1; }
	migrate_ok late dst 2>"$E2E_OUT/late.err" &
	pid=$!
	until_true 60 on src test -e $gate && container_exec src late sh -c 'rm /srv/gone && echo late >/srv/late' || { fail "nothing could be written"; ok=1; }
	on src rm -f $gate || ok=1
	wait $pid || { cat "$E2E_OUT/late.err" >&2; ok=1; }
	# shellcheck disable=SC2016
	[ $ok = 0 ] && { container_exec dst late sh -c '[ "$(cat /srv/late)" = late ] && [ ! -e /srv/gone ]' || fail "it is as it was before"; } && stood_still late && expect_traffic && stop_verify late || ok=1
	[ $ok = 0 ] || { e2e_logs; e2e_reset; }
	migrd_restart src && [ $ok = 0 ]
}

# The same with every RDMA object made, and connected, while the container stands still.
without_pre_setup() {
	MIGRATE_OPTIONS=--no-pre-setup moved --mode mixed --qps 4 &&
		{ jq -e '.phases_ms.create > 0 and .steps_ms["create.build"] > 0' "$E2E_OUT/migrate.json" >/dev/null ||
			{ cat "$E2E_OUT/migrate.json" >&2; fail "nothing was made during the stop"; }; }
}
# A program that has closed all of RDMA is a container like any other; its library is still there.
without_rdma() {
	start_verify src bare --mode mixed --qps 2 --close-file /tmp/close && container_exec src bare touch /tmp/close &&
		until_true 60 container_exec src bare test -e /tmp/close.done && migrate_ok bare dst &&
		{ jq -e '.resources.qp == 0 and .partners == []' "$E2E_OUT/migrate.json" >/dev/null || fail "there was RDMA left"; } &&
		stop_verify bare || { e2e_logs; e2e_reset; return 1; }
}

# One container moves to where its partner is, which then moves away.
both_ends() {
	start_pair two src peer "$@" && migrate_ok two-a peer && pair_traffic two && migrate_ok two-b dst && pair_traffic two && stop_pair two ||
		{ e2e_logs; e2e_reset; return 1; }
}

# Both ends in one container: nobody else has a part in it.
its_own_partner() {
	# shellcheck disable=SC2016
	start_container src own bash -c '"$@" 127.0.0.1 & a=$!; "$1" --dev rxe0 --stall 240 --status /tmp/status & b=$!; wait $a && wait $b' \
		bash "$E2E_LIB/migr_verify" --dev rxe0 --stall 240 --stop-file /tmp/stop --rate "$E2E_RATE" "$@" || return 1
	own_bytes() { container_exec "$(container_host own)" own cat /tmp/status | jq -r .bytes; }
	own_moves() { local x; x=$(own_bytes) && sleep 1 && [ "$(own_bytes)" -gt "$x" ]; }
	until_true 60 own_moves || { fail "no traffic"; return 1; }
	migrate_ok own dst && jq -e '.partners == []' "$E2E_OUT/migrate.json" >/dev/null && until_true 30 own_moves &&
		container_exec dst own touch /tmp/stop && container_wait dst own 120 ||
		{ container_log dst own >&2; e2e_logs; e2e_reset; return 1; }
	container_exec dst own grep '^{' /tmp/log | jq -es 'length == 2 and all(.[]; .errors == 0 and .wr_posted == .wr_completed)' >/dev/null ||
		{ container_log dst own >&2; fail "not every work request was completed without a fault"; return 1; }
	container_remove dst own
}

# A server that looked its GID up and registered its memory in the beginning goes on telling clients of both, wherever it is.
# The rail's GIDs have another order at the destination.
rail_gids() {	# HOST "ADDRESS..": of rail 0, in this order
	on_sh "$1" 'ip addr flush dev eth1 scope global && for a in "${@}"; do ip addr add "$a" dev eth1 $([ "${a#*:}" = "$a" ] || echo nodad); done' $2
}
late_clients() {
	local v4
	v4=$(on_sh dst 'ip -4 -o addr show dev eth1 | awk "{print \$4}"') && rail_gids dst "fd00:77::2/64 $v4" &&
		start_container src late "$E2E_LIB/migr_server" --dev rxe0 --clients 5 --json /tmp/json && until_true 30 visit &&
		migrate_ok late dst && visit --early && visit --client-first --forge 0x100 && migrate_ok late src && visit && visit --client-first &&
		container_wait src late 30 && container_exec src late cat /tmp/json | jq -e '.errors == 0 and .clients == 5' >/dev/null ||
		{ container_log "$(container_host late)" late >&2; e2e_logs; rail_gids dst "$v4"; e2e_reset; return 1; }
	rail_gids dst "$v4" && container_remove src late
}

# A client that has died has an end here that nobody has told: it has to move, too, and the host is not kept for it.
dead_client() {
	start_container src late "$E2E_LIB/migr_server" --dev rxe0 --clients 3 --json /tmp/json && until_true 30 visit && visit --vanish &&
		on src migrctl migrate late --to dst --dry-run --json | jq -e '.would_move and .connections_gone == 1' >/dev/null && migrate_ok late dst && { jq -e '.connections_gone == 1 and (.gone | length) == 1' "$E2E_OUT/migrate.json" >/dev/null || fail "not told of"; } &&
		visit && container_wait dst late 30 && container_exec dst late cat /tmp/json | jq -e '.errors == 0 and .clients == 3' >/dev/null ||
		{ container_exec "$(container_host late)" late cat /tmp/json >&2; container_log "$(container_host late)" late >&2; e2e_logs; e2e_reset; return 1; }
	container_remove dst late
}

# clients_meanwhile DOES..: while memory is copied ahead one comes, and one leaves that was there: a QP, a CQ and an MR are made, and destroyed at
# both ends. With the stop it is found that the record has changed, and all is begun again. One is there all the time.
clients_meanwhile() {
	local gate=/tmp/ahead pid ok=0 n=2 who
	local -A stays=()
	come() { E2E_LIMIT=300 visit --stay "/tmp/stay.$1" & stays[$1]=$!; until_true 30 on peer test -e "/tmp/stay.$1"; }
	leave() { on peer rm -f "/tmp/stay.$1" && wait "${stays[$1]}" && unset "stays[$1]"; }
	[[ " $* " != *" comes "* ]] || n=3
	on_sh peer 'rm -f /tmp/stay.*' && start_container src late "$E2E_LIB/migr_server" --dev rxe0 --clients $((n + 1)) --json /tmp/json && until_true 30 visit && come stays && come leaves &&
		migrd_restart src "MIGR_FAULT=source.pre-copy.begin:while=$gate" || ok=1
	MIGRATE_OPTIONS=--pre-copy migrate_ok late dst 2>"$E2E_OUT/late.err" &
	pid=$!
	until_true 60 on src test -e $gate || { fail "nothing was copied ahead"; ok=1; }
	leave leaves || ok=1
	[ $n = 2 ] || come comes || ok=1
	while kill -0 $pid 2>/dev/null; do	# it comes to the gate once more
		on src rm -f $gate
		sleep 0.3
	done
	wait $pid || { cat "$E2E_OUT/late.err" >&2; ok=1; }
	for who in "${!stays[@]}"; do leave "$who" || ok=1; done
	[ $ok = 0 ] && { jq -e --argjson n $n '.tries == 2 and .resources.qp == $n and .resources.cq == $n and .resources.mr == $n' "$E2E_OUT/migrate.json" >/dev/null ||
		{ cat "$E2E_OUT/migrate.json" >&2; fail "what there was in the end did not move, or something else did"; }; } &&
		container_wait dst late 30 && container_exec dst late cat /tmp/json | jq -e --argjson n $((n + 1)) '.errors == 0 and .clients == $n' >/dev/null && container_remove dst late || ok=1
	[ $ok = 0 ] || { container_log "$(container_host late)" late >&2; e2e_logs; e2e_reset; }
	migrd_restart src && [ $ok = 0 ]
}

step "clients that come after a move" late_clients
step "a client that comes, and one that leaves, while memory is copied ahead" clients_meanwhile comes leaves
walk_step "a client that leaves while memory is copied ahead" clients_meanwhile leaves
walk_step "a client that has died" dead_client
walk_step "memory copied ahead of the stop" memory_ahead
step "three processes in one container, one by runc exec" several_processes --mode mixed --qps 2
walk_step "what it writes in its root filesystem before the stop" written_late --mode mixed --qps 2
step "resources that come and go all the time" churn --mode mixed --qps 2
walk_step "a service that is its own partner" its_own_partner --mode mixed --qps 2
walk_step "made and connected during the stop" without_pre_setup
walk_step "all of RDMA closed before" without_rdma
walk_step "both ends move, one to the other first" both_ends --mode mixed --qps 2
e2e_end
