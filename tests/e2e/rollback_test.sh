#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A migration that fails half-way, by real causes: the source goes on, its traffic with it, and both ends agree in the
# end about every work request and byte. Then the same container can still be moved.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

back_on_source() { expect_running c src && expect_traffic; }

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
	[ $status != 0 ] || fail "the migration should have failed" || return 1
	[ $status -lt 10 ] || fail "migrctl ended with status $status"
}

destination_killed() {
	# Slowed down at the copy, so that the cut falls into it.
	migrd_restart src MIGR_FAULT=source.copy.begin:sleep=3 || return 1
	while_migrating '^copy' testbed kill dst
	local r=$?
	[ $r = 0 ] && back_on_source
	r=$?
	testbed boot dst && host_setup dst && migrd_restart src && return $r
}
restore_fails() {
	# CRIU opens the program's file when it builds the memory.
	on dst mv "$E2E_LIB/migr_verify" "$E2E_LIB/migr_verify.away" || return 1
	migrate_refused c dst 'restore|CRIU'
	local r=$?
	on dst mv "$E2E_LIB/migr_verify.away" "$E2E_LIB/migr_verify" || return 1
	[ $r = 0 ] && back_on_source && on_sh dst '! pgrep -x criu && [ -z "$(ls /run/runc)" ]'
}
partner_migrd_killed() {
	migrd_restart src MIGR_FAULT=source.drain.begin:sleep=3 || return 1
	while_migrating '^drain' migrd_kill peer KILL
	local r=$?
	[ $r = 0 ] && back_on_source
	r=$?
	migrd_start peer && migrd_restart src && return $r
}
destination_migrd_killed() {
	migrd_restart src MIGR_FAULT=source.copy.begin:sleep=3 || return 1
	while_migrating '^copy' migrd_kill dst KILL
	local r=$?
	[ $r = 0 ] && back_on_source
	r=$?
	migrd_start dst && migrd_restart src && return $r
}
# The partner has changed its path already, and changes it back.
undone_at_the_end() {	# ID
	migrd_restart src MIGR_FAULT=source.commit.begin:fail || return 1
	migrate_refused "$1" dst "fault point 'source.commit.begin'" && expect_running "$1" src && expect_traffic
	local r=$?
	migrd_restart src && return $r
}
undone_then_moved() {	# OPTION...
	start_verify src u "$@" && undone_at_the_end u && migrate_ok u dst && expect_traffic && stop_verify u || { e2e_logs; e2e_reset; return 1; }
}
moves_now() { migrate_ok c dst && expect_traffic; }

step "traffic" start_verify src c --mode mixed --qps 4 || { e2e_logs; e2e_end; }
step "CRIU cannot restore" restore_fails || e2e_logs
step "migrd on the partner is killed" partner_migrd_killed || e2e_logs
step "migrd on the destination is killed" destination_migrd_killed || e2e_logs
step "undone after the partner has switched" undone_at_the_end c || e2e_logs
step "the destination is killed during the copy" destination_killed || e2e_logs
step "and yet it can be moved" moves_now || e2e_logs
step "after all that both ends agree" stop_verify c || e2e_reset
step "SRQ: undone after the partner has switched, then moved" undone_then_moved --srq --mode mixed --qps 2
e2e_end
