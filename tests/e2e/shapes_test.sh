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
several_processes() { VERIFY_PROCESSES=3 moved "$@"; }
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

step "made and connected during the stop" without_pre_setup
step "all of RDMA closed before" without_rdma
# Two that want each other's processes: one waits for the other. Then one end moves to where the other is.
both_ends() {
	start_pair two src peer "$@" &&
		at_once migrate_ok two-a dst "$E2E_OUT/two-a.json" -- migrate_ok two-b src "$E2E_OUT/two-b.json" && pair_traffic two &&
		migrate_ok two-a src && pair_traffic two && stop_pair two ||
		{ e2e_logs; e2e_reset; return 1; }
}

step "memory copied ahead of the stop" memory_ahead
step "three processes in one container" several_processes --mode mixed --qps 2
step "resources that come and go all the time" churn --mode mixed --qps 2
step "both ends move, at the same time and one to the other" both_ends --mode mixed --qps 2
e2e_end
