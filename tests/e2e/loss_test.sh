#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# The RDMA network is bad when a container is to be moved: wait-before-stop does not end within its limit. What is under
# way is cut off at both ends, told apart (executed or not), and the rest replayed on the new path: every work request
# completes once, in order, with its bytes.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
E2E_RATE=200	# something is to be under way when it happens

wire() { testbed link peer 0 --loss "$1" --direction "${WIRE:-both}" >/dev/null; }	# PERCENT: of what goes to and from the partner
replayed() {	# the report says how many
	jq -c .replayed "$E2E_OUT/migrate.json" | sed 's/^/# replayed: /'
	jq -e '.replayed.wrs > 0 and .replayed.qps > 0 and .replayed.atomics_lost == 0' "$E2E_OUT/migrate.json" >/dev/null ||
		fail "nothing was replayed, or an atomic was lost"
}
both_agree() { expect_traffic && stop_verify c; }

# while_bad LOSS OPTION.. -- FAULTS MIGRATE..: LOSS % of the partner's packets are lost, both ways, from when everything is
# connected, just before the suspension, to the end of the migration. Not longer: a connection that meets 30 % for long breaks
# by itself, as it would without a migration.
while_bad() {
	local loss=$1 options=() err=$E2E_OUT/loss.err pid ok=0 gate=/tmp/connected
	shift
	while [ "$1" != -- ]; do options+=("$1"); shift; done
	local faults=$2
	shift 2
	start_verify src c "${options[@]}" && migrd_restart src "MIGR_FAULT=source.connect.end:while=$gate$faults" || { e2e_reset; return 1; }
	MIGRATE_OPTIONS="--drain-limit 300" "$@" 2>"$err" &
	pid=$!
	if until_true 100 on src test -e $gate; then
		wire "$loss" && on src rm -f $gate || ok=1
	else
		fail "it was not connected"
		migrd_kill src	# nor does it wait at the gate any more
		ok=1
	fi
	wait $pid || ok=1
	wire 0
	migrd_restart src || ok=1	# without the faults
	[ $ok = 0 ] || sed 's/^/# /' "$err" >&2
	return $ok
}
lossy() {	# OPTION...
	while_bad 30 "$@" -- "" migrate_ok c dst && replayed && both_agree || { e2e_logs; e2e_reset; return 1; }
}
while_cut() { while_bad 100 "$@"; }
cable_cut() {	# OPTION...
	while_cut "$@" -- "" migrate_ok c dst && replayed && both_agree || { e2e_logs; e2e_reset; return 1; }
}
# The migration fails after both ends were cut and have told each other how far they were: the old path takes the replay.
cable_cut_and_back() {	# OPTION...
	while_cut "$@" -- ",source.commit.begin:fail" migrate_refused c dst "source.commit.begin" 1 && expect_running c src && both_agree ||
		{ e2e_logs; e2e_reset; return 1; }
}
# Where a policy is configured the receives of an SRQ have names of the library's, and it is known which came back. There is no backup here.
srq_with_names() { with_policy exact lossy --srq --any-order --mode send --qps 2 --size 16384; }
# Where none is it cannot be told which of an SRQ's receives a message came into in part: nothing is cut, the container stays.
srq_stays() {
	while_bad 30 --srq --mode send --qps 2 --size 16384 -- "" migrate_refused c dst "cannot be replayed" 1 && expect_running c src && both_agree ||
		{ e2e_logs; e2e_reset; return 1; }
}

# An atomic that was executed and whose answer is lost must not be executed again, and cannot complete: it ends with an error,
# which the report says. Both ends then check that what the atomics have left can come from each executed once, and tell how many
# were executed and not answered: as many as the report says. Nothing else may be wrong. (Not with some packets lost: soft-RoCE
# itself then executes atomics twice. A NAK counts for it as the acknowledgement of an atomic whose answer was lost, and it sends
# that again under a new PSN.)
atomics() {	# OPTION...
	local ok=0 h
	while_cut "$@" -- "" migrate_ok c dst || ok=1
	jq -c .replayed "$E2E_OUT/migrate.json" | sed 's/^/# replayed: /'
	if [ $ok = 0 ] && jq -e '.replayed.atomics_lost == 0' "$E2E_OUT/migrate.json" >/dev/null; then
		replayed && both_agree || { e2e_logs; e2e_reset; return 1; }
		return
	fi
	[ $ok = 0 ] && { container_wait dst c 90; [ $? = 1 ]; } && { peer_wait verify 90; [ $? = 1 ]; } || ok=1
	h=$(container_log dst c; peer_log verify)
	jq -es --slurpfile m "$E2E_OUT/migrate.json" '$m[0].replayed.atomics_lost as $lost | length == 2 and
		all(.[]; .errors == 1 and .corrupted + .duplicated + .reordered + .lost == 0 and .failed == .retry_exceeded) and
		(map(.retry_exceeded) | add) > 0 and (map(.unanswered_least) | add) <= $lost and (map(.unanswered_most) | add) >= $lost' \
		<<<"$(grep '^{' <<<"$h")" >/dev/null || ok=1
	[ $ok = 0 ] && container_remove dst c || { echo "$h" >&2; e2e_logs; e2e_reset; fail "the lost atomic"; return 1; }
}

# Requests come to the partner, and nothing that it says.
answers_lost() {	# OPTION...
	WIRE=out atomics "$@" && { jq -e '.replayed.atomics_lost > 0' "$E2E_OUT/migrate.json" >/dev/null || fail "no answer to an atomic was lost"; }
}

walk_step "30 % loss: messages of several packets" lossy --mode send --size 16384 --qps 4
step "the partner's cable is cut: WRITE and its messages" cable_cut --mode write_imm --size 16384 --qps 4
walk_step "the cable is cut: atomics are executed once" atomics --mode atomic --qps 4
step "answers are lost: atomics are executed once" answers_lost --mode atomic --qps 4
walk_step "30 % loss: READ" lossy --mode read --size 16384 --qps 2
walk_step "the cable is cut, and it goes back" cable_cut_and_back --mode unsignalled --size 8192 --qps 2
walk_step "30 % loss and an SRQ, with a policy" srq_with_names
walk_step "30 % loss and an SRQ: it stays where it is" srq_stays
e2e_end
