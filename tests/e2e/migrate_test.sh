#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A container is moved under traffic, there and back; both ends then agree about every work request and byte.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

# What verbs answer is compared, too, at both ends.
started() {	# OPTION...
	[ "$VERIFY_PROGRAM" = migr_datagram ] || set -- --query "$@"
	start_verify src mv "$@"
}
moved() {	# OPTION...: src to dst
	started "$@" && migrate_ok mv dst && expect_traffic && stop_verify mv || { e2e_logs; e2e_reset; return 1; }
}
# The host is emptied: it is all that there is.
drained() {	# OPTION...
	local out=$E2E_OUT/drain.json E2E_LIMIT=$E2E_MIGRATE_LIMIT
	started "$@" && on src migrctl drain --to peer --to dst --dry-run --json >"$out" && jq -e '.stays == [] and .moved == [] and (.would_move | length) == 1' "$out" >/dev/null && expect_running mv src &&
		on src migrctl drain --to dst --max-stop 300000 --json >"$out" && jq -e '.stays == [] and .moved[0].migrated and .moved[0].to == "dst"' "$out" >/dev/null && expect_running mv dst &&
		[ "$(on src migrctl drain --to dst)" = "nothing has RDMA resources here" ] && expect_traffic && stop_verify mv || { cat "$out" >&2; e2e_logs; e2e_reset; return 1; }
}
# What stays is told, and why; the others leave all the same if that is wanted.
drained_in_part() {
	local out=$E2E_OUT/drain.json E2E_LIMIT=$E2E_MIGRATE_LIMIT said bad=0
	started "$@" || return 1
	on_sh src 'LD_PRELOAD= setsid -f ib_write_bw -d rxe0 -p 18777 </dev/null >/dev/null 2>&1' && until_true 20 listens src 18777 || bad=1
	! said=$(on src migrctl drain --to dst 2>&1) && grep -q 'process [0-9]* (ib_write_bw) stays: it is in no container of runc' <<<"$said" && grep -q 'Nothing was touched' <<<"$said" && expect_running mv src ||
		{ fail "drain of what cannot leave: $said"; bad=1; }
	! on src migrctl drain --to dst --keep-going --json >"$out" && jq -e '.status == 1 and (.moved | length) == 1 and (.stays | length) == 1' "$out" >/dev/null && expect_running mv dst || { cat "$out" >&2; fail "with --keep-going"; bad=1; }
	on src pkill -x ib_write_bw
	[ $bad = 0 ] && expect_traffic && stop_verify mv || { e2e_logs; e2e_reset; return 1; }
}
# shellcheck disable=SC2120 # step calls it, with arguments
there_and_back() {
	started "$@" && migrate_ok mv dst "$E2E_OUT/there.json" && expect_traffic && { migrate_ok mv src 2>"$E2E_OUT/progress" || { cat "$E2E_OUT/progress" >&2; false; }; } && expect_traffic &&
		stop_verify mv || { e2e_logs; e2e_reset; return 1; }
}
# As containerd and podman start them, or who writes "runc run .. | logger".
writes() { container_exec "$1" mv sh -c 'echo "$1" >/proc/1/fd/3' sh "$2"; }	# HOST TEXT
writes_nowhere() {	# HOST
	[ "$(container_exec "$1" mv readlink /proc/1/fd/3)" = /dev/null ] && writes "$1" lost ||
		{ container_exec "$1" mv ls -l /proc/1/fd >&2; fail "its standard output on $1 is not /dev/null"; }
}
piped() {
	CONTAINER_PIPED=1 start_verify src mv && writes src kept && until_true 10 on src grep -qx kept /tmp/piped &&
		migrate_ok mv dst 2>"$E2E_OUT/progress" && grep -q 'is a pipe to a program of this host' "$E2E_OUT/progress" && expect_traffic && writes_nowhere dst &&
		migrate_ok mv src && expect_traffic && writes_nowhere src && stop_verify mv || { cat "$E2E_OUT/progress" >&2; e2e_logs; e2e_reset; return 1; }
}
summary_is_complete() {
	jq -e '(.service_blackout_ms > 0) and (.communication_blackout_ms > 0) and (.bytes_copied > 0) and
		(.phases_ms | length > 5) and (.resources.qp == 4) and (.resources.cq > 0) and (.resources.mr > 0) and
		.from == "dst" and .to == "src" and .rollback_reason == null' "$E2E_OUT/migrate.json" >/dev/null ||
		{ cat "$E2E_OUT/migrate.json" >&2; fail "the summary of migrctl is not complete"; }
}

# migrate.json is of the way back, which dst began.
history_has_it() {
	local id
	id=$(printf %08x "$(jq .migration "$E2E_OUT/migrate.json")")
	on dst migrctl history --json | jq -e --slurpfile it "$E2E_OUT/migrate.json" 'last == $it[0]' >/dev/null || fail "the history of dst does not end with the summary" || return 1
	on dst migrctl report "$id" --json | jq -e --slurpfile it "$E2E_OUT/migrate.json" '. == $it[0]' >/dev/null || fail "migrctl report --json is not the summary" || return 1
	on dst migrctl report "$id" -o /mnt/out/report.html && grep -q '>freeze.rdma</text>.*<rect' "$E2E_ROOT/build/testbed/$MIGR_BED/dst/out/report.html" &&
		grep -q '<td>peer</td>' "$E2E_ROOT/build/testbed/$MIGR_BED/dst/out/report.html" || fail "no report, or without phases or partner" || return 1
	jq -e '.partner_figures[0].traffic | (.at_ms | length > 10) and (.rx_mbps | max > 0) and (.tx_mbps | max > 0)' "$E2E_OUT/migrate.json" >/dev/null &&
		grep -q 'ports of peer carried' "$E2E_ROOT/build/testbed/$MIGR_BED/dst/out/report.html" || fail "the traffic of the partner is not known"
}

# Who looks for it on dst, which it has left again.
told_where_it_went() {
	local id how
	id=$(jq -r .id "$E2E_OUT/migrate.json")
	for how in "" --dry-run; do
		# shellcheck disable=SC2086 # none, or one word
		! on dst migrctl migrate mv --to src $how >/dev/null 2>"$E2E_OUT/refused.err" && grep -q "no container 'mv' on this host.*; migration $id took it from here to src" "$E2E_OUT/refused.err" ||
			{ cat "$E2E_OUT/refused.err" >&2; fail "dst does not say where it went ($how)"; return 1; }
	done
}

# A line for each phase, as they happen; without --json they go to standard output.
progress_is_told() {
	local phases
	phases=$(sed -nE 's/^([a-z]+) +[0-9]+\.[0-9] ms\r?$/\1/p' "$E2E_OUT/progress" | xargs)
	[ "$phases" = "check record prepare connect suspend drain freeze copy ready commit resume destroy" ] ||
		{ cat "$E2E_OUT/progress" >&2; fail "phases that migrctl has printed: $phases"; }
}

# One grep for the number that migrctl says tells the story on every host; a line without it is of no step of a migration.
logs_have_its_number() {
	local id h log
	id=$(jq -r .id "$E2E_OUT/migrate.json")
	[[ $id =~ ^[0-9a-f]{8}$ ]] || fail "migrctl's JSON has no number: $id" || return 1
	for h in src dst peer; do
		log=$E2E_ROOT/build/testbed/$MIGR_BED/$h/out/migrd.log
		grep "migration=$id " "$log" >"$E2E_OUT/$h.story" || fail "the log of $h does not know migration $id" || return 1
		! grep ' phase=' "$log" | grep -v ' migration=' >&2 || fail "on $h, steps of no migration" || return 1
		! grep -v "^time=[^ ]*Z level=[a-z]* host=$h " "$E2E_OUT/$h.story" >&2 || fail "lines of $h of another form" || return 1
	done
	grep -q ' phase=source.drain ms=[0-9.]* msg="done"$' "$E2E_OUT/dst.story" && grep -q ' peer=dst phase=partner.drain ms=' "$E2E_OUT/peer.story" &&
		grep -q ' peer=dst phase=destination.ready ms=' "$E2E_OUT/src.story" || { cat "$E2E_OUT"/*.story >&2; fail "the story is not whole"; }
}

# docs/threat-model.md has them. runc and CRIU, which it has started until now, had all: else nothing would have moved.
migrd_may_little() {
	local h caps
	for h in src dst peer; do
		caps=$(on_sh "$h" 'sort -u <(sed -n "s/^CapPrm:\t//p" "/proc/$(pgrep -x migrd)/task/"*/status)')
		[ "$caps" = 000001000008143b ] || fail "capabilities of migrd's threads on $h: $caps" || return 1
	done
}

# Its devices and the library are what migr-inject has given to a bundle that has nothing for RDMA but an annotation.
by_annotation() {
	local h
	for h in src dst; do on_sh "$h" 'mkdir -p /usr/lib/migr && cp "$1/libmigr.so" /usr/lib/migr/' "$E2E_LIB" || return 1; done
	CONTAINER_ANNOTATION=uverbs0 there_and_back "$@"
}

# Its QPs have only answered until it has moved, and send from there on and back.
answers_first() {
	started --rts-file /tmp/rts "$@" && migrate_ok mv dst && expect_traffic && container_exec dst mv touch /tmp/rts && expect_traffic &&
		migrate_ok mv src && expect_traffic && stop_verify mv || { e2e_logs; e2e_reset; return 1; }
}
# Windows that the partner ends with SEND_WITH_INV and their owner with LOCAL_INV, and that are bound anew each time.
invalidated() { "$@" && expect_invalidated mv; }
busy() { E2E_RATE=500 there_and_back "$@"; }
step "mixed, 4 QPs, memory windows at both ends, some invalidated again and again, there and back" invalidated busy --windows --invalidate --mode mixed --qps 4 &&
	step "migrctl's summary is complete" summary_is_complete &&
	step "each phase has its line" progress_is_told &&
	step "who looks for it where it was is told where it went" told_where_it_went &&
	step "migrd's threads have only the capabilities that they need" migrd_may_little &&
	step "the logs of all hosts have its number" logs_have_its_number &&
	step "history has it, and there is a report of it" history_has_it
walk_step "standard output that is a pipe of the host, there and back" piped
walk_step "a container that asked by annotation, there and back" by_annotation --mode mixed --qps 2
walk_step "mixed, 4 QPs, events" moved --mode mixed --qps 4 --events
walk_step "mixed, 2 QPs, ibv_wr_*" moved --mode mixed --qps 2 --wr-api
walk_step "mixed, 2 QPs, ibv_wr_*, atomic writes, there and back" since_kernel 6.3 "has no atomic writes" busy --mode mixed --qps 2 --wr-api --atomic-write
walk_step "send with immediate, too few receives" moved --mode send_imm --qps 2 --rnr
walk_step "UC, mixed, 3 QPs" moved --transport uc --mode mixed --qps 3
walk_step "a host is emptied as far as that can be" drained_in_part --mode mixed --qps 2
step "the host is emptied: UC on an SRQ, events" drained --transport uc --srq --mode send --qps 2 --events
walk_step "QPs in RTR, which go to RTS where it has moved to" answers_first --mode mixed --qps 2
self_loaded() { VERIFY_PROGRAM=migr_loaded "$@"; }
walk_step "a program that loads libibverbs itself: ibv_wr_*, zero-based memory with relaxed ordering, CQs that are resized, a second context" self_loaded moved --wr-api --iova --resize --second --mode mixed --qps 3
walk_step "ibv_cq_ex, events, a child by fork" moved --cq-ex --events --fork --mode mixed --qps 2
walk_step "SRQ that is resized" moved --srq --resize --mode mixed --qps 3
walk_step "SRQ, events, too few receives" moved --srq --mode send_imm --qps 2 --events --rnr
walk_step "memory windows at both ends" moved --windows --mode mixed --qps 4
# The provider does not offer what the driver can do (tests/programs/rereg_provider.cc).
reregistered() {
	local h E2E_VARS=("LD_PRELOAD=$E2E_LIB/libmigr.so:$E2E_LIB/librereg_provider.so")
	for h in "${E2E_HOSTS[@]}"; do on_sh "$h" 'cp "$1/build/user/tests/programs/librereg_provider.so" "$2/"' "$E2E_ROOT" "$E2E_LIB" || return 1; done
	there_and_back --rereg=access,pd "$@"
}
walk_step "memory whose access and PD were changed, there and back" since_kernel 6.12 "changes nothing of memory" reregistered --mode mixed --qps 2
walk_step "memory windows that are invalidated, events, SRQ, ibv_cq_ex" invalidated there_and_back --invalidate --srq --events --cq-ex --mode send --qps 2
# Rails lose nothing. UD loses what the partner sends during the stop to where nobody is any more; whatever the container has sent comes.
unconnected() {
	local E2E_RATE=150 VERIFY_PROGRAM=migr_datagram said=("$E2E_OUT/migrate.json")
	rm -f "$E2E_OUT/there.json"
	"$@" || return 1
	[ ! -e "$E2E_OUT/there.json" ] || said+=("$E2E_OUT/there.json")
	jq -es '.[0].not_come == 0' "$E2E_OUT/mv.peer.json" >/dev/null &&
		jq -es --argjson rate "$E2E_RATE" --argjson lost "$(jq .not_come "$E2E_OUT/mv.container.json")" \
			'$lost <= $rate * (map(.service_blackout_ms / 1000 + 1) | add)' "${said[@]}" >/dev/null ||
		{ cat "$E2E_OUT"/mv.*.json >&2; fail "more datagrams are lost than those that were sent to it during the stop"; }
}
step "UD on an SRQ: datagrams, answers, a multicast group" unconnected moved --srq
walk_step "UD: there and back" unconnected there_and_back
e2e_end
