#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A migration that fails half-way, by real causes: the source goes on, its traffic with it, and both ends agree in the
# end about every work request and byte. Then the same container can still be moved.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/faults.sh disable=SC1091
. "$(dirname "$0")/faults.sh"
e2e_up && faults_begin || exit 1

nothing_at_destination() { on_sh dst '! pgrep -x criu && ! pgrep -x migr_verify && [ -z "$(ls /run/runc)" ]'; }
back_on_source() {
	expect_running c src && expect_traffic || return 1
	host_is_down dst || until_true 20 nothing_at_destination || { on dst ps -A >&2; fail "something of it is left at the destination"; }
}
# rolled_back OUT.json ERR WHAT..: that, in this order, and no more is said to be taken back.
rolled_back() {
	local out=$1 err=$2 words
	shift 2
	words=$(printf ', %s' "$@")
	jq -e '.rolled_back == $ARGS.positional' "$out" --args "$@" >/dev/null && grep -qx "migrctl: rolled back: ${words#, }" "$err" ||
		{ jq -c .rolled_back "$out" >&2; grep 'rolled back' "$err" >&2; fail "it is not said that this was rolled back: ${words#, }"; }
}

# while_migrating PATTERN CMD...: starts a migration of c to dst, runs CMD when its progress shows PATTERN, and expects the
# migration to fail.
while_migrating() {
	local pattern=$1 err=$E2E_OUT/rollback.err pid status=0
	shift
	: >"$err"
	migrate c dst "$E2E_OUT/rollback.json" 2>"$err" &
	pid=$!
	until_true 60 grep -qE "$pattern" "$err" || { cat "$err" >&2; kill $pid; wait $pid; fail "progress never showed '$pattern'"; return 1; }
	"$@" || { kill $pid; wait $pid; fail "could not do: $*"; return 1; }
	wait $pid || status=$?
	sed 's/^/# /' "$err"
	[ $status = 1 ] || fail "migrctl ended with status $status, not as what fails and is taken back"
}

# By the operator, in the stop: nothing is committed before the copy.
cancelled() {
	local r=0
	migrd_restart src MIGR_FAULT=source.copy.begin:sleep=3 || return 1
	while_migrating '^copy' on src migrctl cancel c --json >"$E2E_OUT/cancel.json" && grep -q 'cancelled by the operator' "$E2E_OUT/rollback.err" &&
		rolled_back "$E2E_OUT/rollback.json" "$E2E_OUT/rollback.err" "destination dst" network checkpoint freeze suspension "partner peer" && back_on_source || r=1
	migrd_restart src && return $r
}
# CRIU hangs at the destination, whose own limit is minutes away.
too_long() {
	local r=0
	migrd_restart src MIGR_FAULT=source.ready.begin:sleep=3 || return 1
	MIGRATE_OPTIONS="--max-stop 10000" while_migrating '^ready' on dst pkill -STOP -x criu && grep -q "'c' stood still for more than the 10000 ms that it may" "$E2E_OUT/rollback.err" &&
		rolled_back "$E2E_OUT/rollback.json" "$E2E_OUT/rollback.err" "destination dst" network checkpoint freeze suspension "partner peer" && back_on_source || r=1
	jq -e '.code == "ETIME" and .service_blackout_ms > 10000 and .service_blackout_ms < 60000' "$E2E_OUT/rollback.json" >/dev/null ||
		{ cat "$E2E_OUT/rollback.json" >&2; fail "its stop did not end then"; r=1; }
	migrd_restart src && return $r
}
destination_killed() {
	# Slowed down at the copy, so that the cut falls into it.
	migrd_restart src MIGR_FAULT=source.copy.begin:sleep=3 || return 1
	while_migrating '^copy' testbed kill dst &&
		rolled_back "$E2E_OUT/rollback.json" "$E2E_OUT/rollback.err" network checkpoint freeze suspension "partner peer"
	local r=$?
	[ $r = 0 ] && back_on_source
	r=$?
	testbed boot dst && host_setup dst && migrd_restart src && return $r
}
# held_at POINT CMD..: starts traffic and its migration to dst, and runs CMD when that has come to POINT of src. @return the status of
# migrctl in $held
held_at() {
	local gate=/tmp/held pid
	faults_begin && fault_snapshots idle && start_verify src c --mode mixed --qps 2 --retries=4 && migrd_restart src "MIGR_FAULT=$1:while=$gate" || return 1
	migrate c dst "$E2E_OUT/rollback.json" 2>"$E2E_OUT/rollback.err" &
	pid=$! held=0
	until_true 100 on src test -e $gate && "${@:2}" || { kill $pid; wait $pid; cat "$E2E_OUT/rollback.err" >&2; fail "it has not come to $1"; return 1; }
	wait $pid || held=$?
	sed 's/^/# /' "$E2E_OUT/rollback.err"
}
# Nothing is left of it on these hosts, which were idle before.
keep_nothing() {	# HOST..
	local h
	for h; do
		fault_snapshot "$h" >"$E2E_OUT/fault.$h.after" && leaks_compare "$E2E_OUT/fault.$h.idle" "$E2E_OUT/fault.$h.after" || return 1
	done
}
only_broken() {	# STATUS OUTPUT: of a program whose connection has ended with an error, which has found nothing else
	[ "$1" = 1 ] && grep '^{' <<<"$2" | jq -es 'length == 1 and .[0].errors == 1 and .[0].failed > 0 and .[0] .corrupted + .[0].duplicated + .[0].reordered + .[0].lost == 0' >/dev/null ||
		{ echo "$2" >&2; fail "it ended with status $1, and not for its connection alone"; }
}
# The container dies with its host, which has not decided: it runs nowhere else. Its partner hears of that as of any death: its QPs are
# not suspended any more.
source_killed() {	# POINT
	local r=0 ended=0
	held_at "$1" testbed kill src || { e2e_reset; return 1; }
	peer_wait verify 90 || ended=$?
	only_broken $ended "$(peer_log verify)" && { until_true "$FAULT_SETTLE" keep_nothing dst peer || keep_nothing dst peer; } || r=1
	testbed boot src && host_setup src && [ $r = 0 ] && moved_anew || { e2e_logs; e2e_reset; return 1; }
}
# It stays where it is, without that partner.
partner_killed() {	# POINT
	local r=0 ended=0
	held_at "$1" kill_peer || { e2e_reset; return 1; }
	[ $held = 1 ] && expect_running c src || r=1
	container_wait src c 90 || ended=$?
	only_broken $ended "$(container_log src c)" && container_remove src c && { until_true "$FAULT_SETTLE" keep_nothing src dst || keep_nothing src dst; } || r=1
	testbed boot peer && host_setup peer && migrd_restart src && [ $r = 0 ] && moved_anew || { e2e_logs; e2e_reset; return 1; }
}
kill_peer() { testbed kill peer && on src rm -f /tmp/held; }
moved_anew() { start_verify src c --mode mixed --qps 2 && migrate_ok c dst && expect_traffic && stop_verify c; }
restore_fails() {
	# CRIU opens the program's file when it builds the memory.
	on dst mv "$E2E_LIB/migr_verify" "$E2E_LIB/migr_verify.away" || return 1
	migrate_refused c dst 'restore|CRIU' 1 &&
		rolled_back "$E2E_OUT/refused.json" "$E2E_OUT/refused.err" "destination dst" network checkpoint freeze suspension "partner peer"
	local r=$?
	on dst mv "$E2E_LIB/migr_verify.away" "$E2E_LIB/migr_verify" || return 1
	[ $r = 0 ] && back_on_source
}
# Restored, and not to be had any more when the others are to be let run.
restored_task_killed() {
	local gate=/tmp/ready pid status=0 err=$E2E_OUT/rollback.err
	migrd_restart src "MIGR_FAULT=source.commit.begin:while=$gate" || return 1
	migrate c dst "$E2E_OUT/rollback.json" 2>"$err" &
	pid=$!
	until_true 100 on src test -e $gate && on dst pkill -KILL -x migr_verify || fail "there is nothing to kill"
	on src rm -f $gate
	wait $pid || status=$?
	sed 's/^/# /' "$err"
	migrd_restart src && [ $status = 1 ] || { fail "migrctl ended with status $status, not as what is taken back"; return 1; }
	grep -q 'waits no more: it has ended' "$err" || { fail "the reason is not said"; return 1; }
	back_on_source
}
# When all but memory is made at the destination, the container's cgroup there may have no more RDMA objects: memory cannot be
# registered, and this is known before the commit.
no_more_objects() {
	on_sh dst 'cd /sys/fs/cgroup/migr && n=$(sed -n "s/^rxe0 .*hca_object=//p" rdma.current) && echo "rxe0 hca_object=$n" >rdma.max'
}
# short_of CONTROLLER SHORTEN UNLIMITED REASON: the cgroup of containers at the destination comes to have too little while c is
# copied to it.
short_of() {
	migrd_restart src MIGR_FAULT=source.copy.begin:sleep=3 && on_sh dst 'mkdir -p /sys/fs/cgroup/migr && echo "+$1" >/sys/fs/cgroup/cgroup.subtree_control' "$1" || return 1
	while_migrating '^copy' "$2"
	local r=$?
	on_sh dst 'echo "$2" >"/sys/fs/cgroup/migr/$1.max"' "$1" "$3" && migrd_restart src || return 1
	[ $r = 0 ] || return 1
	grep -qE "$4" "$E2E_OUT/rollback.err" || fail "the reason is not said" || return 1
	back_on_source
}
memory_refused() {
	short_of rdma no_more_objects "rxe0 hca_object=max" 'cannot register MR 0x[0-9a-f]+ \([0-9]+ bytes\) of process [0-9]+ here: .*rdma\.max' &&
		on_sh dst '! rdma res show mr | grep " pid "'
}
# The cgroup of containers there has less memory than this one needs.
less_memory() { on_sh dst "echo 8M >/sys/fs/cgroup/migr/memory.max"; }
memory_runs_out() { short_of memory less_memory max 'memory\.max' && only_out_of_memory; }
# The kernel says whom it has ended, with a call trace. That, and nothing else.
only_out_of_memory() {
	local said
	said=$(testbed check --new) || ! said=$(grep -v '^dst: .*Call Trace:' <<<"$said") || { echo "$said" >&2; fail "a kernel has complained"; }
}
# The partner has changed its path already, and changes it back.
undone_then_moved() {	# OPTION...
	start_verify src c "$@" && sleep 2 && faults_remember && fault_case source.commit.begin:fail src "fault point 'source.commit.begin'" && migrate_ok c dst && expect_traffic &&
		stop_verify c || { e2e_logs; e2e_reset; return 1; }
}
moves_now() { migrate_ok c dst && expect_traffic; }
# Held where both hosts have all of its memory and keys, and once it is over.
nobody_reads_along() {
	local gate=/tmp/copied pid h ok=0
	migrd_restart src "MIGR_FAULT=source.ready.begin:while=$gate" || return 1
	migrate c dst 2>"$E2E_OUT/gate.err" &
	pid=$!
	if until_true 100 on src test -e $gate; then
		for h in src dst; do private_files "$h" 'pages-*.img' 'migr*.img' || ok=1; done
		private_files peer || ok=1
		on src rm -f $gate || ok=1
	else
		fail "it was not copied"
		migrd_kill src
		ok=1
	fi
	wait $pid || { cat "$E2E_OUT/gate.err" >&2; ok=1; }
	for h in src dst peer; do private_files "$h" || ok=1; done
	migrd_restart src && migrate_ok c src && [ $ok = 0 ]
}

step "traffic" start_verify src c --windows --invalidate --mode mixed --qps 4 || { e2e_logs; e2e_end; }
step "CRIU cannot restore" restore_fails || e2e_logs

# The most telling of the walk (scripts/faults, tests/faults/walk): where each host can die so that another has to find out.
walk_step "cancelled in the stop" cancelled || e2e_logs
walk_step "a stop that takes longer than it may" too_long || e2e_logs
walk_step "what must be the same afterwards" faults_remember
walk_step "partner.switch.end:exit" fault_case partner.switch.end:exit src || e2e_logs
walk_step "source.decide.end:exit" fault_case source.decide.end:exit any || e2e_logs
walk_step "a restored process is killed before the commit" restored_task_killed || e2e_logs
walk_step "what it leaves on disks meanwhile is root's alone" nobody_reads_along || e2e_logs
step "the destination is killed during the copy" destination_killed || e2e_logs
walk_step "memory that cannot be registered at the destination" memory_refused || e2e_logs
walk_step "memory that runs out at the destination" memory_runs_out || e2e_logs
walk_step "and yet it can be moved" moves_now || e2e_logs
agree() { stop_verify c && expect_invalidated c; }
step "after all that both ends agree, on windows that were invalidated, too" agree || e2e_reset
walk_step "the source is killed during the copy" source_killed source.copy.begin
walk_step "the source is killed before the commit, when the partner has switched" source_killed source.commit.begin
walk_step "the partner's host is killed before it has switched" partner_killed source.ready.begin
walk_step "SRQ, windows: undone after the partner has switched, then moved" undone_then_moved --srq --invalidate --mode mixed --qps 2
faults_end
e2e_end
