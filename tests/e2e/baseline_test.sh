#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Without any migration: containers with libmigr talk to their partner, with every verb, and end well.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

traffic() {	# OPTION...
	start_verify src base "$@" && expect_traffic && stop_verify base || { e2e_reset; return 1; }
}
perftest() {
	start_peer "$1" "$1" -d rxe0 -F -D 3 -s 4096 -t 32 || return 1
	until_true 20 on_sh peer 'ss -Hltn "sport = :18515" | grep -q .' || fail "$1 does not listen" || return 1
	start_container src pt "$1" -d rxe0 -F -D 3 -s 4096 -t 32 "$E2E_PEER" || return 1
	container_wait src pt 60 || { container_log src pt; peer_log "$1"; return 1; }
	peer_wait "$1" 60 || { peer_log "$1"; return 1; }
	container_remove src pt
}

all_is_well() {
	doctor_says 0 'all(.[]; .status == "ok") and ([.[].check | select(test("^(src|dst|peer): (migrd|certificate|rdma rxe[01]/1)$"))] | length == 12) and
		([.[].check | select(test("^(dst|peer): path rxe[01]/1$"))] | length == 4)'
}

step "migrctl doctor finds nothing wrong" all_is_well
step "mixed, 4 QPs, polling" traffic --mode mixed --qps 4
walk_step "mixed, 4 QPs, events" traffic --mode mixed --qps 4 --events
walk_step "mixed, 4 QPs, ibv_wr_*" traffic --mode mixed --qps 4 --wr-api
walk_step "mixed, 16 QPs" traffic --mode mixed --qps 16
walk_step "send, too few receives" traffic --mode send --qps 2 --rnr
E2E_VARS=(MIGR_FORCE_SWITCHED=1)
walk_step "mixed, 4 QPs, everything on the switched path" traffic --mode mixed --qps 4
walk_step "mixed, 4 QPs, events, switched path" traffic --mode mixed --qps 4 --events
walk_step "mixed, 4 QPs, ibv_wr_*, switched path" traffic --mode mixed --qps 4 --wr-api
E2E_VARS=()
walk_step "unmodified ib_write_bw" perftest ib_write_bw
walk_step "unmodified ib_send_bw" perftest ib_send_bw
e2e_end
