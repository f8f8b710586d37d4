#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# `make shapes`: programs of the distribution, which know nothing of migr, are moved there and back in the middle of what they do.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

# there_and_back NAME PORT QPS CMD..: CMD on peer, where it listens at PORT, and with peer's address behind it in a container. It still has
# QPS connected QPs, or more, whenever it is moved; both ends then end with success.
there_and_back() {
	local name=$1 port=$2 qps=$3 to
	shift 3
	start_peer "$name" "$@" && until_true 20 listens peer "$port" && start_container src "$name" "$@" "$E2E_PEER" && until_true 60 has_qps src "$qps" || return 1
	for to in dst src; do
		sleep 3	# of traffic
		migrate_ok "$name" "$to" && jq -e --argjson n "$qps" '.resources.qp >= $n' "$E2E_OUT/migrate.json" >/dev/null ||
			{ cat "$E2E_OUT/migrate.json" >&2; fail "no $qps QPs were moved to $to"; return 1; }
	done
	container_wait src "$name" 200 && peer_wait "$name" 60 && ! container_log src "$name" | grep -iE 'error|fail' && container_remove src "$name"
}
has_qps() { [ "$(on "$1" rdma res show qp | grep -cE 'link rxe0/.* type (RC|UD) .*state RTS ')" -ge "$2" ]; }	# HOST NUMBER
moved() {
	there_and_back "$@" && return
	container_log src "$1" >&2
	peer_log "$1" >&2
	e2e_logs
	on peer pkill -KILL '^(ib_|ibv_|ucx_)'
	e2e_reset
	return 1
}
perftest() { moved "$1" 18515 "$2" "$1" -d rxe0 -F -D 90 -q "$2" "${@:3}"; }	# PROGRAM QPS OPTION..
pingpong() { moved "ibv_$1_pingpong" 18515 "$2" "ibv_$1_pingpong" -d rxe0 -g 1 -n "${@:3}"; }	# KIND QPS ROUNDS OPTION..
# Soft-RoCE's GRH is not what UCX looks for, with libmigr or without. The client's options say what is done; the server takes them, too.
ucx() {	# TRANSPORT QPS ROUNDS OPTION..
	moved "ucx-$1" 13337 "$2" env UCX_TLS="$1" UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=1 UCX_UD_VERBS_ETH_DGID_CHECK=n ucx_perftest -w 10 -n "$3" "${@:4}"
}

# Not to and fro (-b): that ends with "invalid request" on soft-RoCE after some seconds, also without libmigr.
step "ib_send_bw, 4 QPs on an SRQ" perftest ib_send_bw 4 --use-srq -s 4096 -t 32
step "ib_read_bw, 8 QPs" perftest ib_read_bw 8
step "ib_atomic_bw" perftest ib_atomic_bw 1
step "ib_write_lat" perftest ib_write_lat 1
step "ibv_rc_pingpong, events" pingpong rc 1 50000 -e
step "ibv_ud_pingpong, events" pingpong ud 1 50000 -e
step "UCX over RC: tagged messages" ucx rc_v 1 200000 -t tag_bw -s 8192
step "UCX over RC: atomics" ucx rc_v 1 100000 -t ucp_fadd -s 8
step "UCX over UD: tagged messages" ucx ud_v 1 150000 -t tag_bw -s 2048
e2e_end
