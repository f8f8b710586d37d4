#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Processes without a container, and checkpoints on disk: moved there and back, stored and restored on another host.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1

STORE=/var/lib/migr-e2e.checkpoint

# A shell with two programs that are connected to each other, by RDMA and by TCP. Its number has to be free elsewhere, too. BESIDE: of a third, in Python.
start_bare() {	# HOST OPTION...
	local h=$1
	shift
	# shellcheck disable=SC2016
	BARE=$(start_process "$h" bare bash -c '
		beside=$1
		shift
		if [ "$beside" ]; then python3 -c "$beside" & fi
		"$@" --json /tmp/bare.b.json & b=$!
		"$@" --json /tmp/bare.a.json --stop-file /tmp/bare.stop 127.0.0.1
		wait $b
	' bash "${BESIDE:-}" "$E2E_LIB/migr_verify" --dev rxe0 --stall 240 "$@") && until_true 60 packets_flow "$h" || fail "no traffic on $h"
}
packets() { on "$1" cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }
packets_flow() { local x; x=$(packets "$1") && sleep 1 && [ "$(packets "$1")" -gt $((x + 50)) ]; }
bare_on() {	# HOST OTHER: it runs there and nowhere else
	on "$1" test -e "/proc/$BARE" && ! on "$2" test -e "/proc/$BARE" && until_true 30 packets_flow "$1" ||
		{ on "$1" ps -ef >&2; fail "process $BARE does not run on $1 (and only there)"; }
}
stop_bare() {	# HOST
	on "$1" touch /tmp/bare.stop
	until_true 60 on_sh "$1" '! test -e /proc/$1' "$BARE" || { fail "process $BARE does not end"; return 1; }
	on_sh "$1" 'rm /tmp/bare.stop; cat /tmp/bare.a.json /tmp/bare.b.json' | tee "$E2E_OUT/bare.json" |
		jq -es 'length == 2 and all(.[]; .errors == 0 and .wr_posted == .wr_completed and .wr_posted > 0)' >/dev/null ||
		{ cat "$E2E_OUT/bare.json" >&2; fail "not every work request was completed without a fault"; }
}
ctl() {	# HOST WORDS..: its JSON is in $E2E_OUT/ctl.json, what it complains of in ctl.err
	testbed exec "$1" -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl "${@:2}" --json >"$E2E_OUT/ctl.json" 2>"$E2E_OUT/ctl.err"
}
ctl_ok() { ctl "$@" && jq -e .migrated "$E2E_OUT/ctl.json" >/dev/null || { cat "$E2E_OUT/ctl.err" >&2; e2e_logs; fail "migrctl ${*:2} on $1"; }; }
ctl_refused() {	# PATTERN HOST WORDS..
	local status=0
	ctl "${@:2}" || status=$?
	[ $status = 3 ] && grep -qE "$1" "$E2E_OUT/ctl.err" || { cat "$E2E_OUT/ctl.err" >&2; fail "status $status; it should be refused with '$1'"; }
}
cleaned() {
	e2e_logs
	e2e_reset
	for h in "${E2E_HOSTS[@]}"; do on_sh "$h" 'for p in migr_verify migr_transfer "n[0-9]+" python3; do pkill -KILL -x "$p"; done; rm -rf "$1"*' "$STORE"; done
	return 1
}

moved() {
	# The next processes of dst would get its numbers.
	start_bare src "$@" && on dst sh -c "echo $((BARE - 5)) >/proc/sys/kernel/ns_last_pid" && ctl_ok src migrate --pid "$BARE" --to dst && bare_on dst src &&
		ctl_ok dst migrate --pid "$BARE" --to src && bare_on src dst && stop_bare src || cleaned
}
# A program with memory that is wiped in what it forks. When it is told to, it forks, and says what is found there.
WIPES='
import mmap, os, time
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)
page[:1] = b"x"
page.madvise(18)
os.mkdir("/tmp/wiped.begun")
while not os.path.exists("/tmp/wiped.say"): time.sleep(0.1)
if os.fork(): os.wait()
else:
    with open("/tmp/wiped.found", "w") as f: print(page[0], file=f)
    os._exit(0)
'
wiped() {
	local h
	for h in src dst; do on_sh "$h" 'rm -rf /tmp/wiped.*'; done
	BESIDE=$WIPES start_bare src "$@" && until_true 30 on src test -e /tmp/wiped.begun && ctl_ok src migrate --pid "$BARE" --to dst && bare_on dst src || { cleaned; return 1; }
	on dst touch /tmp/wiped.say && until_true 30 on dst test -s /tmp/wiped.found && [ "$(on dst cat /tmp/wiped.found)" = 0 ] ||
		{ fail "a process forked there has what was to be wiped"; cleaned; return 1; }
	stop_bare dst || cleaned
}
# A program that sends to itself, by TCP over the loopback. It calls itself by how often something has arrived.
# shellcheck disable=SC2016
SPEAKS='
import ctypes, socket, time
server = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(server.getsockname())
b = server.accept()[0]
for n in range(1, 1 << 30):
    a.sendall(b"x")
    assert b.recv(1) == b"x"
    ctypes.CDLL(None).prctl(15, b"n%d" % n)
    time.sleep(0.05)
'
speaks() { local n; n=$(on "$1" cat "/proc/$BARE/comm") && sleep 1 && [ "$(on "$1" cat "/proc/$BARE/comm")" != "$n" ]; }
filters() { on_sh "$1" 'nft list ruleset; iptables -S; ip6tables -S'; }	# HOST
unfiltered() {	# HOST: as before
	filters "$1" | diff "$E2E_OUT/filters.$1" - >&2 || fail "$1 filters other packets than before"
}
connected() {
	local h
	BARE=$(start_process src speaks python3 -c "$SPEAKS") && until_true 30 speaks src || { fail "no TCP on src"; cleaned; return 1; }
	for h in src dst; do filters "$h" >"$E2E_OUT/filters.$h"; done
	migrd_restart src MIGR_FAULT=source.commit.begin:fail && ! ctl src migrate --pid "$BARE" --to dst && until_true 10 speaks src ||
		{ cat "$E2E_OUT/ctl.err" >&2; fail "its TCP connection did not go back"; cleaned; return 1; }
	unfiltered src && migrd_restart src && ctl_ok src migrate --pid "$BARE" --to dst && until_true 10 speaks dst && ! on src test -e "/proc/$BARE" &&
		unfiltered src && unfiltered dst && on dst kill "$BARE" || cleaned
}
# A program that writes to one that stays, as in "program | logger". It calls itself by how often it has.
# shellcheck disable=SC2016
PIPES='
import ctypes, os, subprocess, sys, time
to = int(sys.argv[1])
reader = subprocess.Popen(["setsid", "-f", "sh", "-c", "exec cat >/tmp/piped.read"], stdin=subprocess.PIPE)
os.dup2(reader.stdin.fileno(), to)
reader.stdin.close()
reader.wait()
for n in range(1, 1 << 30):
    os.write(to, b"%d\n" % n)
    ctypes.CDLL(None).prctl(15, b"n%d" % n)
    time.sleep(0.05)
'
piped() {
	BARE=$(start_process src piped python3 -c "$PIPES" 1) && until_true 30 speaks src && ctl_ok src migrate --pid "$BARE" --to dst && until_true 10 speaks dst &&
		! on src test -e "/proc/$BARE" && [ "$(on dst readlink "/proc/$BARE/fd/1")" = /dev/null ] && on dst kill "$BARE" ||
		{ fail "a process whose output is read here does not go on there"; cleaned; return 1; }
	BARE=$(start_process src piped python3 -c "$PIPES" 9) && until_true 30 speaks src &&
		ctl_refused 'has a pipe to process [0-9]+ \(cat\) .*\(descriptor 9\)' src migrate --pid "$BARE" --to dst && until_true 10 speaks src && on src kill "$BARE" || cleaned
}
number_taken() {	# that of a thread
	local number
	start_bare src "$@" && number=$(on_sh src 'ls "/proc/$(pgrep -nx migr_verify)/task" | tail -n1') && [ "$number" -gt "$BARE" ] || { fail "no thread"; cleaned; return 1; }
	# shellcheck disable=SC2016
	on_sh dst 'for i in 1 2 3 4 5; do
			echo $(($1 - 1)) >/proc/sys/kernel/ns_last_pid
			setsid sleep 60 </dev/null >/dev/null 2>&1 &
			# What dst starts next must not take others of them.
			[ $! != "$1" ] || { echo $(($1 + 1000)) >/proc/sys/kernel/ns_last_pid; exit 0; }
			kill $!
		done
		exit 1' "$number" || { fail "process number $number could not be taken"; cleaned; return 1; }
	ctl_refused "process number $number is in use" src migrate --pid "$BARE" --to dst && bare_on src peer &&
		on dst kill "$number" && stop_bare src || cleaned
}
# Of the checkpoint as it is now.
changed_images_refused() {
	local bad=$STORE.bad
	on_sh dst 'rm -rf "$2"; cp -a "$1" "$2"; f=$(ls -S "$2"/images/pages-*.img | head -n1); truncate -s -4096 "$f"' "$STORE" "$bad" &&
		ctl_refused 'pages-[0-9]+\.img is truncated: it has' dst restore "$bad" &&
		on_sh dst 'rm -rf "$2"; cp -a "$1" "$2"; f=$(ls -S "$2"/images/pages-*.img | head -n1); printf X | dd of="$f" bs=1 seek=4000 conv=notrunc status=none' "$STORE" "$bad" &&
		ctl_refused 'pages-[0-9]+\.img is not what was stored' dst restore "$bad" &&
		on_sh dst 'rm -rf "$2"; cp -a "$1" "$2"; cp /bin/true "$2/images/migr.img"; chmod 600 "$2/images/migr.img"' "$STORE" "$bad" &&
		ctl_refused 'migr\.img is damaged' dst restore "$bad" &&
		on_sh dst 'rm -rf "$2"; cp -a "$1" "$2"; sed -i "s/\"abi\": [0-9]*/\"abi\": 0/" "$2/checkpoint.json"' "$STORE" "$bad" &&
		ctl_refused 'was made by release .* of migr \(versions .*\), this is' dst restore "$bad" && ! on dst test -e "/proc/$BARE"
}
stored() {
	start_bare src "$@" && ctl_ok src checkpoint "$BARE" "$STORE" || { cleaned; return 1; }
	jq -e '.connections_gone == 0' "$E2E_OUT/ctl.json" >/dev/null && ! on src test -e "/proc/$BARE" || { fail "it still runs, or lost a connection"; cleaned; return 1; }
	on_sh src '[ "$(stat -c %a "$1")" = 700 ] && ! find "$1/images" -type f ! -perm 600 | grep -q .' "$STORE" ||
		{ on src ls -lR "$STORE" >&2; fail "others may read the checkpoint"; cleaned; return 1; }
	# To the other host, where it is refused until nobody else can read it.
	local copy
	copy=$E2E_OUT/$(basename "$STORE")
	rm -rf "$copy" && testbed get src "$STORE" "$copy" && testbed put dst "$copy" "$(dirname "$STORE")" &&
		on_sh dst 'chown -R 0:0 "$1"; chmod -R go-rwx "$1"; chmod 644 "$1/images/migr.img"' "$STORE" || { cleaned; return 1; }
	ctl_refused "migr.img can be read or written by others" dst restore "$STORE" && on dst chmod 600 "$STORE/images/migr.img" &&
		on_sh dst 'cp -a "$1" "$1.bad"; head -c 100 "$1/checkpoint.json" >"$1.bad/checkpoint.json"' "$STORE" &&
		ctl_refused 'is damaged' dst restore "$STORE.bad" &&
		changed_images_refused && ctl_ok dst restore "$STORE" && bare_on dst src && ctl_refused "process number $BARE is in use" dst restore "$STORE" &&
		stop_bare dst || cleaned
}
# A container whose partner is not stored with it: both ends learn that the connection is gone. What it has written since is gone, too.
container_stored() {
	local written=$E2E_BUNDLES/cp/rootfs/written
	CONTAINER_WRITABLE=1 start_verify src cp "$@" && on src touch "$written" && ctl_ok src checkpoint cp "$STORE.c" && on src touch "$written-since" || { cleaned; return 1; }
	local gone='.connections_gone == 2 and (.gone | length == 2 and all(.[]; .vqpn > 0 and .to_qpn > 0 and (.to_gid | test("^10[.]"))))'
	jq -e "$gone" "$E2E_OUT/ctl.json" >/dev/null || { cat "$E2E_OUT/ctl.json" >&2; fail "it does not say which connections are gone"; cleaned; return 1; }
	! container_host cp 2>/dev/null && ctl_ok src restore "$STORE.c" && jq -e "$gone" "$E2E_OUT/ctl.json" >/dev/null &&
		expect_running cp src && on src test -e "$written" && ! on src test -e "$written-since" || { fail "it was not restored as it was"; cleaned; return 1; }
	local status=0
	container_wait src cp 60 || status=$?
	[ $status = 1 ] && container_log src cp | grep -q 'Work Request Flushed Error' || { container_log src cp >&2; fail "the restored program did not see that its connection is gone"; cleaned; return 1; }
	peer_wait verify 120 && { fail "the partner did not see that its connection is gone"; cleaned; return 1; }
	peer_log verify | grep -qE 'transport retry counter exceeded|the partner gave up|closed its TCP' || { peer_log verify >&2; fail "what did the partner see?"; cleaned; return 1; }
	container_remove src cp
}

# It goes on telling its clients what it knew where it was stored.
stored_server() {
	local out=$E2E_ROOT/build/testbed/$MIGR_BED/src/out/stored.tar	# which dst can read
	start_container src late "$E2E_LIB/migr_server" --dev rxe0 --clients 3 --json /tmp/json && until_true 30 visit && ctl_ok src checkpoint late "$STORE.s" &&
		on_sh src 'tar -C / -cpf /mnt/out/stored.tar "${1#/}"' "$STORE.s" && on_sh dst 'tar -C / -xpf "$1"' "$out" && rm -f "$out" && ctl_ok dst restore "$STORE.s" && visit --early && visit --client-first &&
		container_wait dst late 30 && container_exec dst late cat /tmp/json | jq -e '.errors == 0 and .clients == 3' >/dev/null || { cleaned; return 1; }
	container_remove dst late
}

# FILTER [VARIABLE=VALUE]: of a program that registers memory for each transfer. What a NIC has written since the copy made ahead is in
# no MR any more when it stops. SPOIL: what the program does to memory before it gives it back. FILTER: of migrctl's JSON.
transfers() {
	on_sh src 'echo madvise >/sys/kernel/mm/transparent_hugepage/enabled'
	BARE=$(start_process src transfer "${@:2}" "$E2E_LIB/migr_transfer" --dev rxe0 --stop-file /tmp/transfer.stop --json /tmp/transfer.json --spoil "${SPOIL:-}") && sleep 3 &&
		on dst sh -c "echo $((BARE - 5)) >/proc/sys/kernel/ns_last_pid; rm -f /tmp/transfer.stop" && ctl_ok src migrate --pid "$BARE" --to dst --pre-copy &&
		jq -e "$1" "$E2E_OUT/ctl.json" >/dev/null && on dst touch /tmp/transfer.stop && until_true 60 on dst test -s /tmp/transfer.json ||
		{ fail "process $BARE was not moved, or does not end"; cleaned; }
}
transfers_ok() {	# [SPOIL [FILTER]]
	local SPOIL=${1:-}
	transfers "${2:-.pre_copy_rounds > 0}" && on dst cat /tmp/transfer.json | tee "$E2E_OUT/transfer.json" | jq -e '.errors == 0 and .transfers > 10' >/dev/null ||
		{ cat "$E2E_OUT/transfer.json" >&2; fail "what was written is not there"; }
}
transfers_stale() {
	transfers '.pre_copy_rounds > 0' MIGR_TEST_NO_TOUCH=1 || return 1
	on dst cat /tmp/transfer.json | jq -e '.errors == 1 and (.first_error | test("and not"))' >/dev/null || fail "memory is right without the marks: this test proves nothing"
}

# Pieces of memory that may be huge, are read after it was copied ahead, and hold zeros: "untouched" until then, or "dropped" by madvise().
# shellcheck disable=SC2016
READS='
import ctypes, mmap, os, sys, time
PIECE, HUGEPAGE, DONTNEED = 2 << 20, 14, 4
def wait_for(name):
    while not os.path.exists("/tmp/zeros." + name): time.sleep(0.05)
def advise(at, what):
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(PIECE), what) == 0
class Piece:
    def __init__(self, name):
        self.dropped = name == "dropped"
        self.map = mmap.mmap(-1, 3 * PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.from_, self.address = -base % PIECE, base + -base % PIECE
        advise(self.address, HUGEPAGE)
        if self.dropped: self.map[self.from_:self.from_ + PIECE] = b"x" * PIECE
    def read(self):
        if self.dropped: advise(self.address, DONTNEED)
        assert self.map[self.from_] == 0
    def bad(self): return PIECE - self.map[self.from_:self.from_ + PIECE].count(0)
pieces = [Piece(name) for name in sys.argv[1:]]
wait_for("read")
for p in pieces: p.read()
open("/tmp/zeros.done", "w").close()
wait_for("say")
open("/tmp/zeros.bad", "w").write("%s\n" % sum(p.bad() for p in pieces))
'
thp() { on_sh "$1" '[ -z "$2" ] || echo "$2" >"$1"; cat "$1"' /sys/kernel/mm/transparent_hugepage/"$2" "${3:-}"; }	# HOST SWITCH [TO]
# Memory was copied ahead ROUNDS times before the stop that came about, the kernel's switch is SWITCH when they are read, BAD bytes are no zeros.
zeros_read() {	# ROUNDS SWITCH BAD PIECE..
	local ahead=/tmp/zeros.ahead
	thp src enabled madvise >/dev/null && thp src use_zero_page 1 >/dev/null && on_sh dst 'rm -f /tmp/zeros.*' && migrd_restart src MIGR_FAULT=source.pre-copy.end:while=$ahead &&
		BARE=$(start_process src zeros python3 -c "$READS" "${@:4}") && sleep 2 || { fail "no process"; cleaned; return 1; }
	on dst sh -c "echo $((BARE - 5)) >/proc/sys/kernel/ns_last_pid"
	at_once ctl_ok src migrate --pid "$BARE" --to dst --pre-copy -- read_ahead "$ahead" "$2" || { cleaned; return 1; }
	jq -e --argjson n "$1" '.pre_copy_rounds == $n' "$E2E_OUT/ctl.json" >/dev/null || { cat "$E2E_OUT/ctl.err" >&2; fail "not $1 rounds"; cleaned; return 1; }
	[ "$(thp src use_zero_page)" = 1 ] || { fail "the host's switch is not as it was"; cleaned; return 1; }
	on dst touch /tmp/zeros.say && until_true 30 on dst test -s /tmp/zeros.bad && [ "$(on dst cat /tmp/zeros.bad)" = "$3" ] ||
		{ fail "bytes that are no zeros: $(on dst cat /tmp/zeros.bad), not $3"; cleaned; return 1; }
	migrd_restart src
}
read_ahead() {	# FILE SWITCH
	local bad=0
	until_true 120 on src test -e "$1" || { fail "nothing was copied ahead"; return 1; }
	[ "$(thp src use_zero_page)" = 0 ] || { fail "the huge page of zeros is not kept out"; bad=1; }
	[ "$2" = 0 ] || thp src use_zero_page "$2" >/dev/null || bad=1
	on src touch /tmp/zeros.read
	until_true 30 on src test -e /tmp/zeros.done || { fail "nothing was read"; bad=1; }
	on src rm "$1" && return $bad
}

step "a process and its children, there and back" moved --mode mixed --qps 2 --rate 200
step "memory that is registered for each transfer" transfers_ok
walk_step "the same, where a part of it is unmapped before" transfers_ok hole
walk_step "where a part of it is made read-only before all is copied during the stop" transfers_ok readonly '.pre_copy_rounds == 0'
walk_step "memory that holds nothing any more, and is registered to be read" since_kernel 6.2 "marks what it pins" transfers_ok dropped
walk_step "without the marks it is stale" transfers_stale
walk_step "zeros that are read after memory was copied ahead" zeros_read 1 0 0 untouched dropped
walk_step "where the huge page of zeros comes nonetheless, all is copied during the stop" zeros_read 0 1 0 untouched
walk_step "where it comes, and other bytes were there, those come back" zeros_read 1 1 2097152 dropped
step "memory that is wiped in what a process forks" wiped --mode mixed --qps 1 --rate 100
step "a TCP connection within the host, back and there" connected
step "a pipe to a program that stays" piped
step "a process number that is in use" number_taken --mode mixed --qps 1 --rate 100
step "stored, and restored on another host" stored --mode mixed --qps 2 --rate 200
walk_step "a stored server is found by who comes later" stored_server
walk_step "a stored container, without its partner" container_stored --mode mixed --qps 2
e2e_end
