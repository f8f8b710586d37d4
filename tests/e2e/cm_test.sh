#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Connections made by librdmacm: they move, under traffic, with either end, and each end learns once that they have ended.
# The programs run without a container: librdmacm needs the network of the RDMA device. E2E_WALK=1: more.
# shellcheck disable=SC2154 # PID_NAME: start_cm sets it by its name
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

CM=$E2E_LIB/migr_cm
for h in "${E2E_HOSTS[@]}"; do
	on "$h" cp --remove-destination "$E2E_ROOT/build/user/tests/programs/migr_cm" /usr/bin/rping "$E2E_LIB/" || exit 1
done

# start_cm HOST NAME CMD...: its number: $PID_NAME
start_cm() {
	local other pid
	for other in "${E2E_HOSTS[@]}"; do on_sh "$other" 'rm -f "/tmp/cm.$1".*' "$2"; done
	pid=$(start_process "$1" "cm.$2" "${@:3}") && printf -v "PID_$2" %s "$pid"
}
status_of() { on "$1" readlink "/tmp/cm.$2.status"; }
messages() { status_of "$1" "$2" | jq -er .messages; }
talks() { local a b; a=$(messages "$1" "$2") && sleep 1 && b=$(messages "$1" "$2") && [ "${b:-0}" -gt "${a:-0}" ]; }
cm_talks() {	# HOST NAME
	until_true 40 talks "$1" "$2" || { cm_logs; fail "no messages at $2 on $1"; return 1; }
	[ "$(status_of "$1" "$2" | jq -r '.errors + .disconnected')" = 0 ] || { cm_logs; fail "$2 on $1 has seen an error or its end"; }
}
cm_logs() { for h in "${E2E_HOSTS[@]}"; do on_sh "$h" 'ls -l /tmp/cm.*' >&2; done; e2e_logs; }
cm_ended() {	# HOST NAME [CONNECTIONS]
	local pid=PID_$2
	until_true 60 on_sh "$1" '! test -e /proc/$1' "${!pid}" || { cm_logs; fail "$2 on $1 does not end"; return 1; }
	status_of "$1" "$2" >"$E2E_OUT/cm.$2.json"
	jq -e --argjson n "${3:-1}" '.errors == 0 and .established == $n and .disconnected == $n and .other == 0 and .messages > 0' "$E2E_OUT/cm.$2.json" >/dev/null ||
		{ cat "$E2E_OUT/cm.$2.json" >&2; cm_logs; fail "$2 on $1 did not see each connection end once, and no error"; }
}
cm_move() {	# NAME FROM TO
	local pid=PID_$1
	testbed exec "$2" -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl migrate --pid "${!pid}" --to "$3" --json >"$E2E_OUT/cm.json" 2>"$E2E_OUT/cm.err" &&
		jq -e .migrated "$E2E_OUT/cm.json" >/dev/null || { cat "$E2E_OUT/cm.err" >&2; cm_logs; fail "$1 was not moved from $2 to $3"; }
}
cm_cleaned() {
	local h
	for h in "${E2E_HOSTS[@]}"; do on_sh "$h" 'pkill -KILL -x migr_cm; pkill -KILL -x rping; true'; done
	e2e_reset
	return 1
}
start_both() {	# server on src, client on peer
	start_cm src server "$CM" --status /tmp/cm.server.status --stop-file /tmp/cm.server.stop "$@" &&
		until_true 20 on src test -L /tmp/cm.server.status &&
		start_cm peer client "$CM" --connect 10.77.10.1 --status /tmp/cm.client.status --stop-file /tmp/cm.client.stop &&
		cm_talks peer client
}

# Another has the port at the destination: nothing moves, until it has it no more.
port_taken() {
	local status=0
	start_cm dst other "$CM" --status /tmp/cm.other.status && until_true 20 on dst test -L /tmp/cm.other.status && start_both || { cm_cleaned; return 1; }
	testbed exec src -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl migrate --pid "$PID_server" --to dst >"$E2E_OUT/cm.err" 2>&1 || status=$?
	[ $status != 0 ] && grep -q 'has port [0-9]* of librdmacm .*Address already in use' "$E2E_OUT/cm.err" ||
		{ cat "$E2E_OUT/cm.err" >&2; fail "the error does not name the port that is taken"; cm_cleaned; return 1; }
	cm_talks peer client && on dst kill -KILL "$PID_other" && cm_move server src dst && cm_talks peer client && on dst touch /tmp/cm.server.stop &&
		cm_ended peer client && cm_ended dst server || cm_cleaned
}
# The id that listens goes on, too: at the new host's address.
both_move() {
	start_both --clients 2 && cm_move server src dst && cm_talks peer client &&
		start_cm peer second "$CM" --connect 10.77.10.2 --status /tmp/cm.second.status && cm_talks peer second &&
		cm_move client peer src && cm_talks src client && cm_talks peer second && on dst touch /tmp/cm.server.stop &&
		cm_ended src client && cm_ended peer second && cm_ended dst server 2 || cm_cleaned
}
there_and_back() {
	start_both && cm_move server src dst && cm_talks peer client && cm_move server dst src && cm_talks peer client &&
		on peer touch /tmp/cm.client.stop && cm_ended peer client && cm_ended src server || cm_cleaned
}
goes_back() {
	migrd_restart src MIGR_FAULT=source.commit.begin:fail && start_both || { cm_cleaned; return 1; }
	local status=0 ok=0
	testbed exec src -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl migrate --pid "$PID_server" --to dst >"$E2E_OUT/cm.json" 2>&1 || status=$?
	[ $status != 0 ] || { fail "the migration should have failed"; cm_cleaned; return 1; }
	cm_talks peer client && cm_talks src server && on src touch /tmp/cm.server.stop && cm_ended peer client && cm_ended src server || { cm_cleaned; ok=1; }
	migrd_restart src && return $ok
}
# An unmodified program, whose client ends as a killed process does.
rping_moves() {
	start_cm src server "$E2E_LIB/rping" -s && until_true 20 listens src 7174 && start_cm peer client "$E2E_LIB/rping" -c -a 10.77.10.1 &&
		until_true 30 rping_talks && cm_move server src dst && until_true 30 rping_talks && on peer kill -KILL "$PID_client" &&
		until_true 60 on_sh dst '! test -e /proc/$1' "$PID_server" || { cm_logs; cm_cleaned; }
}
rping_talks() { local x; x=$(sent_by peer) && sleep 1 && [ "$(sent_by peer)" -gt $((x + 10)) ] && on peer test -e "/proc/$PID_client"; }
sent_by() { on "$1" cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

step "both ends move, one after the other; the server disconnects" both_move
walk_step "a port that is taken at the destination" port_taken
walk_step "the server moves there and back; the client disconnects" there_and_back
walk_step "a migration that goes back" goes_back
walk_step "rping: the server moves, the client is killed" rping_moves
e2e_end
