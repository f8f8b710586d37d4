#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# No page that a NIC wrote is stale at the destination, whatever memory it lies in, and what was not written is not copied
# in the stop. The traffic is very slow and its window large: most of what is written between the copy made ahead and the
# stop is not written again before the end, when both ends compare their memory with what it must be, and that also where
# a minute lies between the two.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
for h in src dst; do
	on "$h" sysctl -qw vm.nr_hugepages=20
	on_sh "$h" 'echo madvise >/sys/kernel/mm/transparent_hugepage/enabled'
done
export E2E_RATE=20

slow_traffic() { start_verify src memory --mode mixed --qps 1 --size 4096 --depth 512 "$@"; }

# written_ahead ROUNDS KIND,.. [OPTION..]: src to dst, memory copied so often while it is written to.
written_ahead() {
	local kb n on_src on_dst
	on_src=$(log_mark src) on_dst=$(log_mark dst)
	slow_traffic --memory "$2" --mr 8 --mr-fill 4 "${@:3}" && MIGRATE_OPTIONS="--pre-copy-rounds $1" migrate_ok memory dst && stop_verify memory ||
		{ e2e_logs; e2e_reset; return 1; }
	jq -e --argjson n "$1" '.pre_copy_rounds == $n' "$E2E_OUT/migrate.json" >/dev/null || { fail "not $1 rounds"; return 1; }
	# --mr: memory that is registered and not written to, or long ago
	jq -e '.bytes_unchanged > 4e6' "$E2E_OUT/migrate.json" >/dev/null ||
		{ cat "$E2E_OUT/migrate.json" >&2; fail "nothing that was copied ahead was left out of the checkpoint"; return 1; }
	kb=$(log_since src "$on_src" | sed -n 's/.*: \([0-9]*\) KB of its registered memory are as they were copied ahead.*/\1/p' | tail -n1)
	[ "${kb:-0}" -ge 4096 ] || fail "CRIU has dumped all registered memory: ${kb:-0} KB were as copied ahead"
	kb=$(log_since src "$on_src" | sed -n 's/.* KB of its registered memory were compared; to \([0-9]*\) KB no NIC has written.*/\1/p' | tail -n1)
	[ "${kb:-0}" -ge 4096 ] || fail "of all registered memory but ${kb:-0} KB a NIC is said to have written to it"
	# Megabytes of an image, of which two may lie at its ends.
	n=$(log_since dst "$on_dst" | sed -n 's/.*[^0-9]\([0-9]*\) pages that were copied ahead are zeros, and not read back.*/\1/p' | tail -n1)
	[ "${n:-0}" -ge 512 ] || fail "all zeros but ${n:-0} pages were read back"
}

# A NIC may write to memory of datagrams until the very end.
datagrams_ahead() {
	local E2E_RATE=150 VERIFY_PROGRAM=migr_datagram
	start_verify src memory && MIGRATE_OPTIONS=--pre-copy migrate_ok memory dst && stop_verify memory ||
		{ e2e_logs; e2e_reset; return 1; }
	jq -e '.bytes_pre_copied > 0' "$E2E_OUT/migrate.json" >/dev/null || fail "nothing was copied ahead"
}

# CRIU 3.17 restores MAP_HUGETLB memory wrongly after a pre-dump: there is none then, which who asks for it is told.
huge_pages() {
	slow_traffic --memory shared,hugetlb,hugetlb && MIGRATE_OPTIONS=--pre-copy migrate_refused memory dst "which was asked for: .*huge pages" 1 && expect_running memory src &&
		migrate_ok memory dst && stop_verify memory ||
		{ e2e_logs; e2e_reset; return 1; }
	jq -e '.bytes_pre_copied == 0' "$E2E_OUT/migrate.json" >/dev/null || fail "hugetlb memory was copied ahead"
}

# stale_without VARIABLE KIND: with the library's marks, or its notes, left out the test above has to find stale memory: at the end, or when a
# message tells of what a WRITE before it has left there.
stale_without() {
	local status=0
	E2E_VARS=("$1=1")
	slow_traffic --memory "$2" && MIGRATE_OPTIONS=--pre-copy migrate_ok memory dst || status=1
	E2E_VARS=()
	[ $status = 0 ] || { e2e_logs; e2e_reset; return 1; }
	if stop_verify memory 2>"$E2E_OUT/stale.err"; then fail "memory is right without $1: this test proves nothing"; return 1; fi
	e2e_reset
	grep -q "^migr_verify: corrupted: " "$E2E_OUT/stale.err" || { cat "$E2E_OUT/stale.err" >&2; fail "it failed for another reason"; }
}

step "huge pages (transparent), shared memory, memfd, in 3 rounds" written_ahead 3 private,shared,thp,memfd,private,private
walk_step "the same in one round" written_ahead 1 private,shared,thp,memfd,private,private
walk_step "receives from an SRQ, of a process with a policy" with_policy resend written_ahead 1 shared,thp,shared,memfd --srq --no-limit --any-order
walk_step "memory of datagrams" datagrams_ahead
walk_step "hugetlb memory is not copied ahead" huge_pages
step "without the notes memory is stale" stale_without MIGR_TEST_NO_TRACKING thp
walk_step "without the marks memory is stale" stale_without MIGR_TEST_NO_TOUCH thp
walk_step "also private memory of small pages" stale_without MIGR_TEST_NO_TOUCH private
e2e_end
