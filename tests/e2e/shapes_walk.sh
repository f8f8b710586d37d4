#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# `make shapes`: the longer walks through shapes of service, those for which `make check` has no time.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
export E2E_MIGRATE_LIMIT=420	# one may have to wait for another

back() { e2e_logs; e2e_reset; return 1; }

# Each end in turn, each to every host: numbers, keys and reservations of births at other hosts have to resolve.
one_after_the_other() {
	local to end=b
	start_pair turn src peer "$@" || { back; return 1; }
	for to in dst src peer dst src; do
		if [ $end = a ]; then end=b; else end=a; fi
		migrate_ok "turn-$end" "$to" && pair_traffic turn || { back; return 1; }
	done
	stop_pair turn || back
}
# Again and again at once, and to the same host.
at_the_same_time() {
	start_pair both src peer "$@" || { back; return 1; }
	at_once migrate_ok both-a dst "$E2E_OUT/both-a.json" -- migrate_ok both-b dst "$E2E_OUT/both-b.json" && pair_traffic both &&
		at_once migrate_ok both-a peer "$E2E_OUT/both-a.json" -- migrate_ok both-b src "$E2E_OUT/both-b.json" && pair_traffic both &&
		at_once migrate_ok both-a src "$E2E_OUT/both-a.json" -- migrate_ok both-b peer "$E2E_OUT/both-b.json" && pair_traffic both &&
		stop_pair both || back
}
# Two services of one host, which have nothing to do with each other.
two_of_a_host() {
	start_pair x src peer "$@" && start_pair y src peer "$@" &&
		at_once migrate_ok x-a dst "$E2E_OUT/x.json" -- migrate_ok y-a dst "$E2E_OUT/y.json" && pair_traffic x && pair_traffic y &&
		migrate_ok x-a src && migrate_ok y-a src && pair_traffic x && pair_traffic y && stop_pair x && stop_pair y || back
}
# The same container at once to two hosts: one is refused, by name.
twice_the_same() {
	start_pair t src peer "$@" || { back; return 1; }
	testbed exec src -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl migrate t-a --to dst --json >"$E2E_OUT/t1.json" 2>"$E2E_OUT/t1.err" &
	local one=$! status=0
	sleep 2
	on src migrctl migrate t-a --to peer --json >"$E2E_OUT/t2.json" 2>"$E2E_OUT/t2.err" || status=$?
	wait $one || { cat "$E2E_OUT/t1.err" >&2; back; return 1; }
	[ $status = 3 ] && grep -q 'is being migrated to dst already' "$E2E_OUT/t2.err" || { cat "$E2E_OUT/t2.err" >&2; fail "status $status of the second"; back; return 1; }
	expect_running t-a dst && pair_traffic t && stop_pair t || back
}
# One service, a partner on every host (itself, where it goes, and another), each with another number of QPs.
partner_on_every_host() {
	local h n=0 clients=() to
	for h in "${E2E_HOSTS[@]}"; do
		n=$((n + 1))
		CONTAINER_IP=10.77.0.$((103 + n)) start_container "$h" "part$n" "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --stall 240 --status /tmp/status ||
			{ back; return 1; }
		clients+=("$n")
	done
	# shellcheck disable=SC2016
	start_container src hub bash -c '
		bad=0 pids=()
		for n in 1 2 3; do "$@" --qps $((n * n)) 10.77.0.$((103 + n)) & pids+=($!); done
		for p in "${pids[@]}"; do wait "$p" || bad=$?; done
		exit $bad
	' bash "$E2E_LIB/migr_verify" --dev rxe0 --stall 240 --stop-file /tmp/stop --rate $((E2E_RATE / 3)) "$@" || { back; return 1; }
	hub_bytes() { local n; for n in "${clients[@]}"; do pair_status "part$n" | jq -r .bytes; done; }
	hub_moves() { local a b; a=$(hub_bytes) && sleep 1 && b=$(hub_bytes) && paste <(echo "$a") <(echo "$b") | awk 'NF != 2 || $2 <= $1 {bad = 1} END {exit bad || NR != 3}'; }
	until_true 60 hub_moves || { fail "no traffic"; back; return 1; }
	for to in dst peer src; do
		migrate_ok hub "$to" && jq -e '(.partners | length == 3) and .resources.qp == 14' "$E2E_OUT/migrate.json" >/dev/null && until_true 30 hub_moves ||
			{ cat "$E2E_OUT/migrate.json" >&2; fail "the way to $to"; back; return 1; }
	done
	container_exec src hub touch /tmp/stop && container_wait src hub 120 || { container_log src hub >&2; fail "a client found a fault"; back; return 1; }
	for n in "${clients[@]}"; do
		h=$(container_host "part$n") && container_wait "$h" "part$n" 120 || { container_log "$h" "part$n" >&2; fail "partner $n found a fault"; back; return 1; }
		container_remove "$h" "part$n"
	done
	container_remove src hub
}

step "one end after the other, to every host" one_after_the_other --mode mixed --qps 2
step "both ends at the same time, three times" at_the_same_time --mode mixed --qps 2
step "two services of a host, at once and one by one" two_of_a_host --mode mixed --qps 2
step "one service to two hosts at once" twice_the_same --mode mixed --qps 1
step "a partner on every host, 1, 4 and 9 QPs" partner_on_every_host --mode mixed
e2e_end
