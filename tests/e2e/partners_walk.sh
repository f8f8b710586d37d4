#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A service with a partner on each of four other hosts, every one with another number of QPs: six hosts, a bed of its own.
set -uo pipefail
export MIGR_BED=${MIGR_BED:-e2e}-six E2E_WITH=src,dst,pa,pb,pc,pd E2E_MEM=${E2E_MEM:-768}
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

PARTNERS=(pa pb pc pd) QPS=(1 4 9 2)
hub_bytes() { local n; for n in "${!PARTNERS[@]}"; do container_exec "${PARTNERS[n]}" "part$n" cat /tmp/status | jq -r .bytes; done; }
hub_moves() { local a b; a=$(hub_bytes) && sleep 1 && b=$(hub_bytes) && paste <(echo "$a") <(echo "$b") | awk 'NF != 2 || $2 <= $1 {bad = 1} END {exit bad || NR != 4}'; }
# Every one of them is asked for its QPs, makes that many spares and goes on with its own traffic.
has_all_partners() {
	jq -e '(.partners | sort) == ["pa", "pb", "pc", "pd"] and .resources.qp == 16 and (.partner_figures | length == 4 and all(.[]; .blackout_ms > 0))' \
		"$E2E_OUT/migrate.json" >/dev/null || { cat "$E2E_OUT/migrate.json" >&2; fail "not all partners took part"; }
}
four_partners() {
	local n to
	for n in "${!PARTNERS[@]}"; do
		CONTAINER_IP=10.77.0.$((111 + n)) start_container "${PARTNERS[n]}" "part$n" "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --stall 240 --status /tmp/status || return 1
	done
	# shellcheck disable=SC2016
	start_container src hub bash -c '
		bad=0 n=111 pids=() qps=($1)
		shift
		for q in "${qps[@]}"; do "$@" --qps "$q" "10.77.0.$n" & pids+=($!); n=$((n + 1)); done
		for p in "${pids[@]}"; do wait "$p" || bad=$?; done
		exit $bad
	' bash "${QPS[*]}" "$E2E_LIB/migr_verify" --dev rxe0 --stall 240 --stop-file /tmp/stop --rate $((E2E_RATE / 3)) "$@" || return 1
	until_true 90 hub_moves || { fail "no traffic"; return 1; }
	for to in dst src; do
		migrate_ok hub "$to" && has_all_partners && until_true 60 hub_moves || { fail "the way to $to"; return 1; }
	done
	container_exec src hub touch /tmp/stop && container_wait src hub 180 || { container_log src hub >&2; fail "a client found a fault"; return 1; }
	for n in "${!PARTNERS[@]}"; do
		container_wait "${PARTNERS[n]}" "part$n" 180 || { container_log "${PARTNERS[n]}" "part$n" >&2; fail "partner $n found a fault"; return 1; }
		container_remove "${PARTNERS[n]}" "part$n"
	done
	container_remove src hub
}
logged() { "$@" || { e2e_logs; e2e_reset; return 1; }; }
step "partners on four hosts, 1, 4, 9 and 2 QPs" logged four_partners --mode mixed
e2e_end
