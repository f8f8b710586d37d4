# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A migration with a fault in it, and what has to hold afterwards. Sourced, after lib.sh, by rollback_test.sh and
# scripts/faults. The container is c, on src, with traffic.

# What keeps a test of a hang short; all others are the defaults.
FAULT_LIMITS='{ "lease_ms": 8000, "resolve_ms": 30000, "undecided_ms": 20000, "prepare_ms": 60000, "upload_ms": 60000,
	"ready_ms": 60000, "checkpoint_ms": 60000, "hook_ms": 9000, "phase_ms": 90000, "fault_hang_ms": 100000 }'
FAULT_SETTLE=${FAULT_SETTLE:-90}	# seconds, until every host is at rest

faults_begin() {
	local h
	for h in "${E2E_HOSTS[@]}"; do
		on_sh "$h" 'jq --argjson l "$1" ".limits = \$l" /etc/migr/migrd.json >/tmp/migrd.json && mv /tmp/migrd.json /etc/migr/migrd.json' \
			"$FAULT_LIMITS" && migrd_restart "$h" || return 1
	done
}

faults_end() {
	local h
	for h in "${E2E_HOSTS[@]}"; do
		on_sh "$h" 'jq "del(.limits)" /etc/migr/migrd.json >/tmp/migrd.json && mv /tmp/migrd.json /etc/migr/migrd.json' && migrd_restart "$h"
	done
}

# What must be the same after each case. (A process that was restored holds the module by its names, one that was not does not.)
fault_snapshot() {
	local all
	all=$(leak_snapshot "$1") && grep -vE '^(migrd_fds|module_users) ' <<<"$all"
}
# fault_snapshots WHEN: of all hosts at once, into fault.HOST.WHEN
fault_snapshots() {
	local h pids=() ok=0
	for h in "${E2E_HOSTS[@]}"; do
		fault_snapshot "$h" >"$E2E_OUT/fault.$h.$1" &
		pids+=($!)
	done
	for h in "${pids[@]}"; do wait "$h" || ok=1; done
	return $ok
}
# Once nothing of an earlier migration is on its way out any more.
nothing_open() { fault_snapshots before && ! grep -E '^(open|folders) [^0]' "$E2E_OUT"/fault.*.before; }
faults_remember() {
	local h
	until_true "$FAULT_SETTLE" nothing_open && return
	nothing_open >&2 && return
	for h in "${E2E_HOSTS[@]}"; do on "$h" migrctl recover >&2; done
	fail "a migration is still open, or a host does not answer"
}
# But for the numbers of what runs: from when it has first left they are reserved where it was born, also when it is back there.
fault_at_rest() {
	local h when
	fault_snapshots after || return 1
	for h in "${E2E_HOSTS[@]}"; do
		for when in before after; do grep -v '^module_reserved_qpns ' "$E2E_OUT/fault.$h.$when" >"$E2E_OUT/fault.$h.$when.but"; done
		leaks_compare "$E2E_OUT/fault.$h.before.but" "$E2E_OUT/fault.$h.after.but" || return 1
	done
}

fault_points() { "$E2E_ROOT/build/user/agent/migrd" --list-faults; }
# Those behind a drain that does not end, and the others: they need another traffic (fault_traffic).
late_point() { [[ $1 =~ \.(cut|settle)\. ]]; }
# What migrctl has to be told so that a migration comes to this point (tests/faults/walk: OPTIONS)
fault_options() {
	case $1 in
	*.create.*) echo --no-pre-setup ;;
	source.pre-copy.*|source.compare.*|partner.track.*) echo --pre-copy ;;
	*.cut.*|*.settle.*) echo --drain-limit 1 ;;
	esac
}
# Without atomics where connections are cut: those whose answers are lost end with an error. The partner's packets take LATE_MS
# there, so that something is under way when the limit is over.
fault_traffic() {
	if late_point "$1"; then echo --mode unsignalled --size 8192 --qps 4; else echo --mode mixed --qps 4; fi
}
LATE_MS=300
delay_peer() { testbed link peer 0 --delay "$1" >/dev/null; }	# MS, each way

host_of_point() {	# POINT FROM TO
	case $1 in source.*) echo "$2" ;; destination.*) echo "$3" ;; *) echo peer ;; esac
}

# As a service manager would.
revive() {
	local h
	for h in "${E2E_HOSTS[@]}"; do
		on "$h" pgrep -x migrd >/dev/null || { on "$h" true >/dev/null 2>&1 && migrd_start "$h"; }
	done
}

# fault_met HOST MARK SPEC: its migrd has come to each of these POINT:ACTION,.. since. (tests/faults/walk: not_met)
fault_met() {
	local said at
	said=$(log_since "$1" "$2")
	for at in ${3//,/ }; do
		grep -qE "fault point ${at/:/: }([^a-z-]|$)" <<<"$said" || { fail "$1 has not come to $at"; return 1; }
	done
}

# go_on_or_broke ID: the traffic goes on; or the connections, which were cut and not settled, have ended with an error at both ends
# (docs/protocol.md, "A drain that does not end"), which have found nothing else: then it is started again.
go_on_or_broke() {
	local h said bad=0
	until_true 30 eval 'verify_moves || [ -s "$(peer_file verify.status)" ]'
	[ -s "$(peer_file verify.status)" ] || { expect_traffic; return; }
	h=$(container_host "$1") || return 1
	container_wait "$h" "$1" 60 || bad=$?
	said=$(container_log "$h" "$1"; peer_log verify)
	[ $bad = 1 ] && grep '^{' <<<"$said" | jq -es 'length == 2 and
		all(.[]; .errors == 1 and .corrupted + .duplicated + .reordered + .lost == 0 and .failed > 0)' >/dev/null ||
		{ echo "$said" >&2; fail "it ended with status $bad, and not for its connection alone"; return 1; }
	note "its connection has ended with an error; it starts again"
	# shellcheck disable=SC2046 # words
	container_remove "$h" "$1" && start_verify "$h" "$1" $(fault_traffic source.cut.begin)
}

# migrate_with_fault ID FROM TO POINT:ACTION OUT.json: whatever becomes of it, the fault was met, and in the end it runs on one
# host, with its traffic.
migrate_with_fault() {
	local point=${4%%:*} h pid status=0 spec=$4 mark mark_from also=
	h=$(host_of_point "$point" "$2" "$3")
	case $point in	# what is only done on the way back needs a reason to go back
	source.back.*|source.thaw.*|source.attach.*|source.reconnect.*) spec+=,source.ready.end:fail ;;
	destination.abort.*|partner.old-path.*|partner.rollback.*) also=source.ready.end:fail ;;
	esac
	migrd_restart "$h" "MIGR_FAULT=$spec" || return 1
	[ -z "$also" ] || migrd_restart "$2" "MIGR_FAULT=$also" || return 1
	until_true 30 verify_moves || { fail "no traffic before the fault"; return 1; }
	mark=$(log_mark "$h") mark_from=$(log_mark "$2")
	! late_point "$point" || delay_peer $LATE_MS
	MIGRATE_OPTIONS=$(fault_options "$point") migrate "$1" "$3" "$5" &
	pid=$!
	while kill -0 $pid 2>/dev/null; do
		revive
		sleep 0.5
	done
	wait $pid || status=$?
	! late_point "$point" || delay_peer 0
	revive
	[ $status -lt 10 ] || { fail "migrctl ended with status $status"; return 1; }
	fault_met "$h" "$mark" "$spec" && { [ -z "$also" ] || fault_met "$2" "$mark_from" "$also"; } || return 1
	until_true "$FAULT_SETTLE" container_host "$1" || { container_host "$1"; return 1; }
	if late_point "$point"; then go_on_or_broke "$1"; else expect_traffic; fi
}

# fault_case POINT:ACTION WHERE [PATTERN]: c is migrated to dst with this fault. In the end it runs on WHERE (src, dst, any),
# with its traffic, and migrctl has said PATTERN; afterwards it is on src again and no host keeps anything.
fault_case() {
	local where=$2 h err=$E2E_OUT/fault.err out=$E2E_OUT/fault.json at
	migrate_with_fault c src dst "$1" "$out" 2>"$err" || { cat "$err" >&2; return 1; }
	sed 's/^/# /' "$err" >&2
	at=$(container_host c) || return 1
	echo "# runs on $at; $(jq -r '.rollback_reason // "no complaint"' "$out" 2>/dev/null)" >&2
	[ "$where" = any ] || [ "$at" = "$where" ] || { fail "it runs on $at, not on $where"; return 1; }
	[ -z "${3:-}" ] || grep -qE "$3" "$err" || { fail "migrctl did not say '$3'"; return 1; }
	for h in "${E2E_HOSTS[@]}"; do
		on_sh "$h" 'tr "\0" "\n" </proc/$(pgrep -x migrd)/environ | grep -q ^MIGR_FAULT=' && { migrd_restart "$h" || return 1; }
	done
	if [ "$at" = dst ]; then
		migrate_ok c src "$E2E_OUT/fault.back.json" 2>/dev/null && expect_traffic || return 1
	fi
	until_true "$FAULT_SETTLE" fault_at_rest || { fault_at_rest; return 1; }
	console_clean
}
