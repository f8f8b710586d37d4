#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# A cable is cut under programs that do not know of it: they go on over the other rail, and back when it is mended, and every
# work request completes once, in order, with its bytes.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
E2E_RATE=200	# something is to be under way when it happens

POLICY=exact LINKS=/tmp/links.json PRELOAD=$E2E_LIB/libmigr.so
# HOST up|down, --loss PCT [--direction in|out], or "inside" or "inside-up": the host itself sets its port down, and up. "both": src and peer
rail() {
	[ "$1" != both ] || { at_once rail src "${@:2}" -- rail peer "${@:2}"; return; }
	case $2 in
	inside) on "$1" ip link set eth1 down ;;
	inside-up) on "$1" ip link set eth1 up ;;
	*) testbed link "$1" 0 "${@:2}" >/dev/null ;;
	esac
}

configure() {	# [MEMBER [LINK]]: rail 0, backed up by rail 1
	local h
	for h in "${E2E_HOSTS[@]}"; do
		on_sh "$h" 'echo "{\"links\": [{\"device\": \"rxe0\"}, {\"device\": \"rxe1\"}$2], \"unique_swap\": [\"migr_kv\"], $1, \"heartbeat_ms\": 1000}" >/tmp/links.json' "${1:-\"paths\": \"cached\"}" "${2:+, $2}" || return 1
	done
}

# run_on HOST NAME CMD...: with libmigr and a policy. Its output: log_of HOST NAME; its exit status: ended HOST NAME.
run_on() {
	on_sh "$1" '
		name=$1 lib=$2 policy=$3 links=$4
		shift 4
		rm -f "/mnt/out/$name".*
		exec setsid -f bash -c "
			env LD_PRELOAD=\$1 MIGR_LINKS=\$4 MIGR_POLICY=\$2 \"\${@:5}\" >/mnt/out/\$3.log 2>&1 </dev/null
			echo \$? >/mnt/out/\$3.status
		" bash "$lib" "$policy" "$name" "$links" "$@" </dev/null >/dev/null 2>&1
	' "$2" "$PRELOAD" "$POLICY" "$LINKS" "${@:3}" || fail "start of $2 on $1"
}
out_of() { echo "$E2E_ROOT/build/testbed/$MIGR_BED/$1/out/$2"; }
log_of() { cat "$(out_of "$1" "$2.log")"; }
ended() {	# HOST NAME SECONDS: @return the exit status of the program
	until_true "$3" test -s "$(out_of "$1" "$2.status")" || { fail "$2 on $1 did not end within $3 s"; return 99; }
	return "$(cat "$(out_of "$1" "$2.status")")"
}
links_of() { on "$1" migrctl links --json; }
backed() {	# HOST: each vQP of each process has a backup
	links_of "$1" | jq -e '.processes | length > 0 and all(.[]; .vqps > 0 and .with_backup == .vqps)'
}
backed_up() {	# HOST: and peer
	until_true 60 backed "$1" && until_true 20 backed peer || fail "no backup on $1 and peer"
}
changed() {	# HOST: vQPs have gone to the other link, and none was lost
	links_of "$1" | jq -e '[.processes[].switchovers[]?] | length > 0 and all(.[]; .done and .broken == 0)' >/dev/null
}
say_change() {
	links_of "$1" | jq -rc --arg h "$1" '.processes[].last_switchover | select(.) |
		"# \($h): link \(.from) -> \(.to) by \(.cause), \(.vqps) vQPs in \(.resume_ns / 1e6 | floor) ms (cut \(.cut_ns / 1e6 | floor)), \(.replayed) replayed, \(.executed) executed already"'
}
logs() { local h; for h in src peer; do echo "--- $1 on $h:"; tail -n 25 "$(out_of "$h" "$1.log")"; links_of "$h" | jq -c '.processes[]'; done >&2; }

ports_up() { local h; for h in src peer; do links_of "$h" | jq -e 'all(.ports[] | select(.device == "rxe0"); .state == "up")' || return 1; done; }
# Until both migrd take it for mended, which is a second later: a program that starts before that begins with a change of its link.
mend() { rail both up; rail peer --loss 0; rail both inside-up; until_true 10 ports_up || :; }
rail_frames() { testbed status | awk -v rail="rail$1" '/^src / {src = 1} src && $1 == rail {print $4; exit}'; }	# that src has sent
frames_are() { [ "$(rail_frames "$1")" -ge "$2" ]; }
goes_over() {	# LINK PROGRAMS: all are there, and send there
	local before
	both_on "$1" && before=$(rail_frames "$1") && until_true 20 frames_are "$1" $((before + 500 * $2)) || fail "it does not go on over rail $1"
}

# outlives "NAME.." SECONDS CUT..: they run at both ends, the cable is cut, and they go on over the other rail; it is mended, and they
# go back, and on to their end.
outlives() {
	local all p limit=$2 ok=0
	read -ra all <<<"$1"
	backed_up src && cut "${@:3}" && goes_over 1 ${#all[@]} && mend && goes_over 0 ${#all[@]} || ok=1
	for p in "${all[@]}"; do
		[ $ok != 0 ] || { ended src "$p" "$limit" && ended peer "$p" "$limit"; } || ok=1
	done
	[ $ok = 0 ] || for p in "${all[@]}"; do logs "$p"; done
	mend
	[ $ok = 0 ] || { e2e_reset; return 1; }
}

start_perftest() {	# PROGRAM PORT OPTION..: at both ends
	local p=$1 name=${NAME:-$1} port=$2 options=(-d rxe0 -F -D "${PERFTEST_S:-90}" -s 4096 -t 32 -p "${@:2}") to=$E2E_PEER
	run_on peer "$name" "$p" "${options[@]}" || return 1
	until_true 20 listens peer "$port" || fail "$p does not listen" || return 1
	[[ " ${options[*]} " = *" -R "* ]] && to=10.77.10.3	# of rail 0
	run_on src "$name" "$p" "${options[@]}" "$to"
}
say_bandwidth() { grep -A1 '#bytes' "$(out_of src "$1.log")" | sed 's/^/# /'; }

perftest() {	# PROGRAM CUT.. [-- OPTION..]
	local p=$1 how=()
	shift
	while [ $# != 0 ] && [ "$1" != -- ]; do how+=("$1"); shift; done
	start_perftest "$p" 18515 "${@:2}" && outlives "$p" 90 "${how[@]}" && say_bandwidth "$p"
}

two_perftests() {	# CUT..
	local PERFTEST_S=150	# two programs that poll, on one processor: looks take their time
	start_perftest ib_write_bw 18515 && start_perftest ib_send_bw 18516 --use-srq -q 4 &&
		outlives "ib_write_bw ib_send_bw" 150 "$@" && say_bandwidth ib_write_bw && say_bandwidth ib_send_bw
}

# UCX's transport for RC, whose QPs have one SRQ, with blocks that take several packets. There is no connection of UD, which has no backup.
ucx() {
	local options=(-d rxe0:1 -x rc_verbs -t am_bw -D bcopy -s 4096 -n 300000)
	run_on peer ucx env UCX_IB_GID_INDEX=1 ucx_perftest || return 1
	until_true 20 listens peer 13337 || fail "ucx_perftest does not listen" || return 1
	run_on src ucx env UCX_IB_GID_INDEX=1 ucx_perftest "${options[@]}" "$E2E_PEER" || return 1
	outlives ucx 240 "$@" && grep '^Final' "$(out_of src ucx.log)" | sed 's/^/# /'
}

# with_both PROGRAM DO.. -- OPTION..: while both ends run and are backed up, DO; then each work request has completed.
with_both() {
	local program=$1 what=() ok=0 both=() o
	shift
	while [ "$1" != -- ]; do what+=("$1"); shift; done
	shift
	for o in "$@"; do
		case $o in --events|--srq|--no-limit|--any-order|--port=*|--rest-file=*|--status=*) both+=("$o") ;; esac
	done
	on src rm -f /tmp/stop
	run_on peer "$program" "$E2E_LIB/$program" --dev rxe0 --connect 60 --stall 60 --json "/mnt/out/$program.json" "${both[@]}" || return 1
	run_on src "$program" "$E2E_LIB/$program" --dev rxe0 --stall 60 --stop-file /tmp/stop --json "/mnt/out/$program.json" "$@" "$E2E_PEER" || return 1
	backed_up src || ok=1
	[ $ok != 0 ] || "${what[@]}" || ok=1
	on src touch /tmp/stop
	ended_well "$program" || { [ -n "${MAY_BREAK_OFF:-}" ] && at_both broke_off "$program"; } || ok=1
	[ $ok = 0 ] || logs "$program"
	mend
	[ $ok = 0 ] || { e2e_reset; return 1; }
}
ended_well() {	# PROGRAM
	ended src "$1" 60 && ended peer "$1" 60 || return 1
	jq -es 'length == 2 and all(.[]; .errors == 0 and .wr_posted == .wr_completed and ([.wr_posted, .transactions] | max > 0))' \
		"$(out_of src "$1.json")" "$(out_of peer "$1.json")" >/dev/null || fail "not every work request was completed without a fault"
}
with_verify() { with_both migr_verify "$@" --rate "$E2E_RATE"; }
with_loaded() { with_both migr_loaded "$@" --rate "$E2E_RATE"; }	# it loads libibverbs itself
# Locks, READs, WRITEs: no transaction is lost or done twice.
with_kv() {
	with_both migr_kv "$@" && jq -rs '"# \(.[0].transactions) transactions, \(.[0].contended) times a lock was taken"' "$(out_of src migr_kv.json)"
}
on_link() { links_of "$1" | jq -e --argjson l "$2" '.processes | length > 0 and all(.[]; .vqps > 0 and .links[$l].vqps == .vqps)'; }
both_on() {	# LINK [HOST]: all vQPs of both ends are there
	until_true 60 on_link "${2:-src}" "$1" && until_true 20 on_link peer "$1" || fail "not all are on link $1"
}
# What the change to link 1 was, of each vQP of a host. migrd keeps 16 of a process.
left_for_1() {
	links_of "$1" | jq -ce '[.processes[] | select(.vqps > 0) | ([.vqps, 16] | min) as $n | .switchovers[-$n:] | if length == $n then .[] else {to: null} end] |
		select(length > 0 and all(.[]; .to == 1))'
}
causes() { jq -r 'map(.cause) | unique | join(" ")'; }
# noticed [both] CUT..: the end that has no carrier sees that, and tells the other one; where ports stay up only silence tells, either end or both.
noticed() {
	local src peer
	src=$(left_for_1 src | causes) peer=$(left_for_1 peer | causes)
	case $1 in
	both) [[ "$src $peer" =~ ^((completion|event|netlink|peer)' '?)+$ ]] ;;
	down|inside) [ "$src" = peer ] && [[ $peer =~ ^((completion|event|netlink)' '?)+$ ]] ;;
	*) [[ $src/$peer =~ completion|heartbeat|channel ]] && [[ ! $src/$peer =~ event|netlink|operator|application|return|prefer ]] ;;
	esac
}
# What the logs say had failed: at that end its port, between the two, or what the other end has told.
failures_said() { log_since "$1" "$2" | grep -o 'from link 0 .* to link 1 .*: .*failure[^,]*' | sed 's/.*: //' | sort -u | xargs; }	# HOST MARK
told_apart() {	# [both] CUT.., after the marks of `cut`
	local src peer
	src=$(failures_said src "${marks[0]}") peer=$(failures_said peer "${marks[1]}")
	case $1 in
	both) [[ $src/$peer = *local* && $src/$peer != *path* ]] ;;	# one may have been told before its port was down
	down|inside) [ "$src/$peer" = "failure told by the other end/local failure" ] ;;
	*) [[ $src/$peer = *"path failure"* && $src/$peer != *local* ]] ;;
	esac
}
cut() {	# [both] CUT..
	local at=peer how=("$@") marks
	marks=("$(log_mark src)" "$(log_mark peer)")
	[ "$1" != both ] || { at=both; shift; }
	rail $at "$@" && both_on 1 || return 1
	until_true 10 noticed "${how[@]}" || fail "cut by ${how[*]}: noticed by $(left_for_1 src | causes) at src, by $(left_for_1 peer | causes) at peer" || return 1
	until_true 10 told_apart "${how[@]}" ||
		fail "cut by ${how[*]}: the log of src says $(failures_said src "${marks[0]}"), that of peer $(failures_said peer "${marks[1]}")"
}
were_under_way() { { left_for_1 src; left_for_1 peer; } | jq -s 'flatten | map(.replayed + .executed) | add'; }	# when it was cut
cuts() {	# N: in a row, every other one of a cable from outside, and of all other kinds in turn
	local i how first=$((RANDOM | 1)) under_way=0 cables=0
	for ((i = 1; i <= $1; i++)); do
		case $(((first + i) % 10)) in
		0|2|4|6|8) how=(down) ;;
		1) how=(both down) ;;
		3) how=(inside) ;;
		5) how=(--loss 100) ;;
		7) how=(--loss 100 --direction in) ;;
		9) how=(--loss 100 --direction out) ;;
		esac
		[[ ${how[*]} != *down ]] || cables=$((cables + 1))
		cut "${how[@]}" && under_way=$((under_way + $(were_under_way))) && mend && both_on 0 && backed_up src || { fail "cut $i of $1: ${how[*]}"; return 1; }
		note "cut $i of $1: ${how[*]}"
	done
	echo "# $under_way work requests were under way at $1 cuts, $cables of them of a cable from outside"
	[ $under_way != 0 ] || fail "nothing was under way at any cut" || return 1
	changed src && changed peer
}
# The driver lets the NIC go, as when it is unplugged. The kernel keeps what is left of it for the programs that hold its device.
unbind() {	# HOST
	on_sh "$1" '
		d=$(basename "$(readlink -f /sys/class/net/eth1/device)")
		setsid -f sh -c "echo $d >/sys/bus/virtio/drivers/virtio_net/unbind" </dev/null >/dev/null 2>&1
	' && until_true 20 on "$1" test ! -e /sys/class/net/eth1 || fail "eth1 is still there on $1"
}
removed() { unbind peer && both_on 1 && on_sh peer 'rdma link show | grep -q "^link rxe0/1" && echo "# rxe0 is held" || echo "# rxe0 is gone already"'; }
# As long as a program has the device open soft-RoCE holds the interface, and the kernel says so after 10 s. That, and nothing else.
only_waited() {
	local said
	said=$(testbed check --new) || ! said=$(grep -v '^peer: .*unregister_netdevice: waiting for eth1 ' <<<"$said") ||
		{ echo "$said" >&2; fail "a kernel has complained"; }
}
device_removed() {
	local r=0
	with_verify removed -- --mode write_imm --qps 4 --size 4096 || r=1
	[ $r != 0 ] || until_true 60 on_sh peer '! rdma link show | grep -q "^link rxe0/1" && ! pgrep -f "[v]irtio_net/unbind"' ||
		{ fail "the kernel holds the device although the programs have ended"; r=1; }
	only_waited || r=1
	testbed kill peer >/dev/null	# it has its NIC again when it boots
	e2e_reset
	return $r
}
# One end prefers the other rail, and then none.
preferred() {
	on src migrctl links prefer rxe1 --wait 30000 >/dev/null && both_on 1 && on src migrctl links prefer --none >/dev/null && both_on 0
}
# A child that is forked while the backup is there, and keeps what it inherits, moves along.
fork_child() { on src pkill -USR1 -x migr_verify && until_true 10 on_sh src '[ "$(pgrep -cx migr_verify)" = 2 ]' || fail "migr_verify has no child"; }
LK=()	# more options of it
# with_container DO..: it is backed up, then DO.
with_container() {
	local E2E_VARS=(MIGR_POLICY="$POLICY") CONTAINER_RDMA="uverbs0 uverbs1"	# its links it hears from migrd
	start_verify src lk --mode write_imm --qps 4 --size 4096 --fork-later "${LK[@]}" && backed_up src && fork_child && "$@" && mend && stop_verify lk ||
		{ logs_of_links; e2e_logs; mend; e2e_reset; return 1; }
}
logs_of_links() { local h; for h in "${E2E_HOSTS[@]}"; do echo "--- links of $h:"; links_of "$h" | jq -c '.processes[]'; done >&2; }
moved_and_cut_there() {	# the rail that it was born on fails where it is now, and is mended
	migrate_ok lk dst && expect_traffic && backed_up dst || return 1
	rail peer down && both_on 1 dst && expect_traffic && mend && both_on 0 dst && expect_traffic && changed dst && changed peer
}
stays_on_its_backup() {	# nobody answers at the destination
	migrd_kill dst TERM
	migrate_refused lk dst "does not answer" && migrd_start dst && until_true 30 on_link src 1 && expect_traffic
}
# The rail that a container was born on is dead, and its host is to be drained.
moved_from_dead_rail() {
	rail src down && both_on 1 || return 1
	[ -z "${E2E_WALK:-}" ] || stays_on_its_backup || return 1
	migrate_ok lk dst && expect_traffic && backed_up dst && both_on 0 dst
}
# move_and_fail HOST FAULTS MIGRATE..: its rail fails when everything is connected ahead, while the program still runs here.
move_and_fail() {
	local host=$1 faults=$2 gate=/tmp/connected err=$E2E_OUT/fail.err pid ok=0
	shift 2
	migrd_restart src "MIGR_FAULT=source.connect.end:while=$gate$faults" && backed_up src || return 1
	"$@" 2>"$err" &
	pid=$!
	if until_true 100 on src test -e $gate; then
		rail "$host" down && sleep 14	# the device gives up its sends after 8 timeouts of 1.07 s
		on src rm -f $gate || ok=1
	else
		fail "it was not connected"
		migrd_kill src	# nor does it wait at the gate any more
		ok=1
	fi
	wait $pid || ok=1
	migrd_restart src || ok=1	# without the faults
	[ $ok = 0 ] || sed 's/^/# /' "$err" >&2
	return $ok
}
was_replayed() {
	jq -c .replayed "$E2E_OUT/migrate.json" | sed 's/^/# replayed: /'
	jq -e '.replayed.qps > 0 and .replayed.atomics_lost == 0' "$E2E_OUT/migrate.json" >/dev/null || fail "nothing was replayed"
}
# What had no backup when its link failed goes on where it is moved to.
moved_while_rail_fails() { move_and_fail src "" migrate_ok lk dst && was_replayed && expect_traffic && backed_up dst && both_on 0 dst; }
# The migration fails, too: it goes on over the other rail, once that is its backup again.
stays_while_rail_fails() { move_and_fail src ",source.commit.begin:fail" migrate_refused lk dst "source.commit.begin" 1 && both_on 1 && expect_traffic; }
# The partner's rail: it goes on over the other one, once that is the backup of what has moved.
moved_while_partners_rail_fails() { move_and_fail peer "" migrate_ok lk dst && both_on 1 dst && expect_traffic; }
# Nothing is posted, so no completion tells that nothing comes through while the ports stay up. What has no heartbeat does not notice it.
found_by_heartbeat() {
	local h
	for h in src peer; do
		on_sh "$h" 'rm -f /tmp/rest; jq ".heartbeat_ms = 0" /tmp/links.json >/tmp/links-still.json' || return 1
	done
	with_verify beside_stillness -- --mode write_imm --qps 4 --size 4096 --rest-file=/tmp/rest --status=/mnt/out/migr_verify.now
}
beside_stillness() { LINKS=/tmp/links-still.json with_loaded silent -- --mode write_imm --qps 4 --size 4096 --port=18526 --rest-file=/tmp/rest --status=/mnt/out/migr_loaded.now; }
# Another process says that QPs are its own: what others of the host have published, what nobody has yet, and all of that of the partner's host.
impostors() {
	local gids said
	mapfile -t gids < <(on peer sh -c 'cat /sys/class/infiniband/rxe0/ports/1/gids/*' 2>/dev/null | grep -v '^\(0000:\)*0000$' | sort -u)
	[ ${#gids[@]} -gt 0 ] || fail "peer has no GID" || return 1
	said=$(on src "$E2E_LIB/migr_impostor" rxe0 1 60 "${gids[@]}") || fail "the impostor could not ask" || return 1
	[[ $said = "0 of "[1-9]* ]] || fail "an impostor has got names: $said"
}
rests() {	# PROGRAM HOST: what it has posted has completed, and it posts nothing
	local now posted
	now=$(out_of "$2" "$1.now")
	posted=$(jq .wr_posted "$now") && sleep 1 && jq -e --argjson n "$posted" '.wr_posted == $n and .wr_completed == $n' "$now"
}
uses() {	# PROGRAM LINK HOST
	links_of "$3" | jq -e --arg p "$1" --argjson l "$2" '[.processes[] | select(.comm == $p)] | length == 1 and all(.[]; .vqps > 0 and .links[$l].vqps == .vqps)'
}
at_both() { "$@" src && "$@" peer; }
causes_of() { links_of "$2" | jq -r --arg p "$1" '.processes[] | select(.comm == $p) | .switchovers[].cause'; }	# PROGRAM HOST
silent() {
	local seen since
	on src touch /tmp/rest && on peer touch /tmp/rest && until_true 20 at_both rests migr_verify && until_true 20 at_both rests migr_loaded || fail "they do not rest" || return 1
	since=$SECONDS
	rail peer --loss 100 && until_true 10 at_both uses migr_verify 1 || fail "no heartbeat has noticed a silent path" || return 1
	since=$((SECONDS - since + 1))
	seen=$(at_both causes_of migr_verify | sort -u | xargs)
	[[ "$seen" =~ ^heartbeat( peer)?$ ]] || fail "a silent path was noticed by $seen" || return 1
	note "noticed within $since s"
	sleep $since
	at_both uses migr_loaded 0 >/dev/null || fail "a silent path was noticed without a heartbeat" || return 1
	mend && on src rm /tmp/rest && on peer rm /tmp/rest && goes_over 0 2
}

error_of() { log_of "$2" "$1" | grep -oE "completed with '[^']*' \(status (2|5|12),|Failed status (2|5|12)" | tail -n 1; }	# PROGRAM HOST: of its path
# broke_off PROGRAM HOST: it has ended with an error of its path, and before that nothing was lost or done twice.
broke_off() {
	local status=0 why
	ended "$2" "$1" 60 || status=$?
	why=$(error_of "$1" "$2") && [ $status != 0 ] && [ $status != 99 ] || fail "$1 on $2 has ended with status $status, and not with an error of its path" || return 1
	note "$1 on $2: $why"
	[[ $1 = ib_* ]] || jq -e '.errors == 1 and .lost + .duplicated + .reordered + .corrupted == 0' "$(out_of "$2" "$1.json")" >/dev/null ||
		fail "$1 on $2: before the error something was lost or done twice"
}
# all_break_off DO.. -- PROGRAM..: where nothing is left for them they get the errors of their paths. They retry twice; 7 times are for ever with
# soft-RoCE. The ends of migr_verify tell each other what they got, those of ib_send_bw do not.
BREAKS_OFF=(-b -D 600 -R --retry_count=2)
all_break_off() {
	local h p ok=0 what=() verify="$E2E_LIB/migr_verify --dev rxe0 --retries 2 --json /mnt/out/migr_verify.json"
	while [ "$1" != -- ]; do what+=("$1"); shift; done
	shift
	# shellcheck disable=SC2086
	run_on peer migr_verify $verify --connect 60 && run_on src migr_verify $verify --mode write_imm --qps 4 --size 4096 --rate $E2E_RATE $E2E_PEER &&
		start_perftest ib_send_bw 18515 "${BREAKS_OFF[@]}" && "${what[@]}" || ok=1
	for p in "$@"; do
		[ $ok != 0 ] || at_both broke_off "$p" || ok=1
	done
	[ $ok = 0 ] || for p in "$@"; do logs "$p"; done
	mend
	for h in src peer; do testbed link "$h" 1 up >/dev/null; done
	[ $ok = 0 ] || { e2e_reset; return 1; }
}
both_ends_then_all_links() {
	backed_up src && cut both inside && mend && both_on 0 && until_true 60 at_both backed && cut both down && testbed link peer 1 down >/dev/null
}
without_a_policy() {
	local POLICY=off
	all_break_off unprotected -- migr_verify ib_send_bw ib_plain
}
unprotected() {	# beside one without libmigr. With -R each has two QPs
	PRELOAD='' NAME=ib_plain start_perftest ib_send_bw 18516 "${BREAKS_OFF[@]}" && until_true 20 on_sh src '[ "$(rdma res show qp | grep -c "state RTS .*comm ib_send_bw")" -ge 4 ]' ||
		fail "they are not connected" || return 1
	rail peer down
}

# Each answer is checked by migr_verify: a sum that every fetch-and-add of a QP has to find.
relayed() {	# DO..
	local r=0
	configure '"atomics": "relayed"' && with_verify is_relayed "$@" -- --mode mixed --qps 4 --size 4096 || r=1
	configure && return $r
}
is_relayed() {
	links_of src | jq -e '.processes | length > 0 and all(.[]; .atomics == "relayed")' >/dev/null || fail "atomics are not relayed" || return 1
	"$@"
}
# The cable is cut and mended; then it loses everything in one direction while the ports stay up, which nothing but silence tells.
again_and_again() {
	cut down && mend && both_on 0 && until_true 60 backed src && cut --loss 100 && mend && both_on 0 && changed src && changed peer &&
		say_change src && say_change peer
}

# What the receiver has counted is not done again under this policy, and a WRITE may be.
resends() {	# MODE DO..
	local POLICY=resend
	with_verify has_policy "${@:2}" -- --mode "$1" --qps 4 --size 4096
}
has_policy() {	# DO..
	links_of src | jq -e --arg p "$POLICY" '.processes | length > 0 and all(.[]; .policy == $p)' >/dev/null || fail "the policy is not $POLICY" || return 1
	"$@"
}
# A cable that loses some of everything is slow, and not dead: there may be changes, but not all the time.
lossy() {	# PCT..
	local pct i h n
	for pct in "$@"; do
		rail peer --loss "$pct" || return 1
		for i in 1 2 3 4 5; do expect_traffic && sleep 3 || return 1; done
		for h in src peer; do
			n=$(times_left "$h") && note "$pct %: $h has left rail 0 $n times" && [ "$n" -le 5 ] || fail "$pct %: $h has left rail 0 $n times" || return 1
		done
	done
	changed_if_at_all src && changed_if_at_all peer
}
times_left() { links_of "$1" | jq '[.processes[].switchovers[]? | select(.from == 0)] | length'; }
# One that loses half of everything is as good as dead, again and again.
half_lost() {
	local h
	backed_up src && rail peer --loss 50 && sleep 20 || return 1
	for h in src peer; do note "$h has left rail 0 $(times_left "$h") times"; done
	mend
}
changed_if_at_all() { links_of "$1" | jq -e 'all(.processes[].switchovers[]?; .done and .broken == 0)' >/dev/null || fail "a change of $1 has failed"; }

# Paths that are nobody's until the cable is cut: some vQPs take one, the others make theirs. Then a container, which leaves them before it moves.
pooled() {
	local r=0
	configure '"paths": "pool"' && with_verify from_pool -- --mode write_imm --qps 16 --size 4096 && with_container moved_and_cut_there || r=1
	configure && return $r
}
has_pool() { links_of "$1" | jq -e '.processes | length > 0 and all(.[]; [.links[].pool] | add > 0)'; }
from_pool() {
	until_true 20 has_pool src && until_true 20 has_pool peer || fail "there is no path in a pool" || return 1
	again_and_again && until_true 20 has_pool src && until_true 20 has_pool peer || fail "no pool after a cut"
}

# The cable of the first backup link is cut, too. The third device is on the network of the testbed's own, whose packets are smaller.
third_link() {
	local h r=0
	for h in src peer; do on "$h" rdma link add rxe2 type rxe netdev eth0 || return 1; done
	configure '"backups": 2' '{"device": "rxe2"}' && with_verify one_after_the_other -- --mode write_imm --qps 4 --size 4096 || r=1
	for h in src peer; do testbed link "$h" 1 up >/dev/null; on "$h" rdma link delete rxe2 || r=1; done
	configure && return $r
}
next_is() { links_of "$1" | jq -e --argjson l "$2" '.processes | length > 0 and all(.[]; .links[$l].backups == .vqps)'; }
one_after_the_other() {
	cut down && until_true 20 next_is src 2 && until_true 20 next_is peer 2 || fail "there is no next link" || return 1
	testbed link peer 1 down >/dev/null && both_on 2 && say_change src && mend && both_on 0 && changed src && changed peer
}

# The device of the backup link is made when the programs run already.
late_device() {
	local r=0 adding
	on src rdma link delete rxe1 || return 1
	{ sleep 8; on src rdma link add rxe1 type rxe netdev eth2; } &
	adding=$!
	with_verify cut down -- --mode write_imm --qps 4 --size 4096 || r=1
	wait $adding && return $r
}
# What a link and a vQP know of their addresses is looked up again after a link was down: they are at other places in the table of
# GIDs, or others.
readdressed() {
	cut inside && addresses peer 200 3 && mend && both_on 0 && backed_up src && say_change src &&
		cut inside && addresses peer 201 && mend && both_on 0 && changed src && changed peer
}
addresses() {	# HOST N..: of rail 0
	on_sh "$1" 'ip addr flush dev eth1 && for n in "${@}"; do ip addr add "10.77.10.$n/24" dev eth1 || exit 1; done' "${@:2}"
}
with_other_addresses() {
	local r=0
	with_verify readdressed -- --mode write_imm --qps 4 --size 4096 || r=1
	addresses peer 3 && return $r
}

# Where migrd keeps no directory of links nothing can be backed up.
on src test -S /run/migr/links.sock || { fail "migrd has no /run/migr/links.sock"; exit 1; }
configure && links_from /tmp/links.json || exit 1
PERFTEST_S=60 step "the cable is cut and mended: ib_write_bw" perftest ib_write_bw down
walk_step "the cable is cut and mended: ib_write_bw, and ib_send_bw with SRQs" two_perftests down
step "another process publishes what is not its own" with_verify impostors -- --mode write_imm --qps 4 --size 4096
walk_step "the path is silent under programs at rest: migr_verify with a heartbeat, migr_loaded without" found_by_heartbeat
step "the cable is cut, mended, silent, mended: migr_loaded, messages and WRITEs, ibv_wr_*, ibv_cq_ex" with_loaded again_and_again -- --mode write_imm --qps 4 --size 8192 --wr-api --cq-ex
walk_step "both ends' NICs fail at once, then every link: migr_verify, ib_send_bw, both ways" all_break_off both_ends_then_all_links -- migr_verify ib_send_bw
walk_step "off: the cable is cut: migr_verify, ib_send_bw, both ways" without_a_policy
walk_step "the cable is cut, mended, silent, mended: migr_verify, messages, WRITEs and atomic writes" since_kernel 6.3 "has no atomic writes" with_verify again_and_again -- --mode write_imm --qps 4 --size 4096 --wr-api --atomic-write
walk_step "the cable is cut and mended: ib_send_bw, with SRQs" perftest ib_send_bw down -- --use-srq -q 4
walk_step "the cable is cut and mended: UCX" ucx down
walk_step "the cable is cut and mended: ib_write_bw, connected by librdmacm" perftest ib_write_bw down -- -R
walk_step "the cable is cut and mended: ib_send_bw, connected by librdmacm" perftest ib_send_bw down -- -R
walk_step "${CUTS:-4} cuts in a row: migr_verify, with an SRQ" with_verify cuts "${CUTS:-4}" -- --mode write_imm --qps 4 --size 8192 --srq --any-order
walk_step "atomics are relayed, the cable is cut, mended, silent, mended: migr_verify, mixed" relayed again_and_again
walk_step "paths of a pool, the cable is cut, mended, silent, mended; a container moves" pooled
walk_step "a host gets other addresses while its cable is cut: migr_verify, messages and WRITEs" with_other_addresses
walk_step "two backup links, one cable is cut after the other: migr_verify, messages and WRITEs" third_link
walk_step "a container that is backed up moves, and fails over there" with_container moved_and_cut_there
LK=(--srq --any-order)
walk_step "a container with an SRQ moves, and fails over there" with_container moved_and_cut_there
walk_step "a container with an SRQ whose rail is dead moves" with_container moved_from_dead_rail
walk_step "a rail fails while a container with an SRQ moves" with_container moved_while_rail_fails
walk_step "a rail fails while a container with an SRQ moves, and it goes back" with_container stays_while_rail_fails
LK=()
walk_step "a container whose rail is dead moves" with_container moved_from_dead_rail
step "a rail fails while a container moves" with_container moved_while_rail_fails
walk_step "a rail fails while a container moves, and it goes back" with_container stays_while_rail_fails
walk_step "the partner's rail fails while a container moves" with_container moved_while_partners_rail_fails
walk_step "${CUTS:-4} cuts in a row: migr_verify, messages and WRITEs" with_verify cuts "${CUTS:-4}" -- --mode write_imm --qps 4 --size 4096
walk_step "${CUTS:-4} cuts in a row: atomics are relayed, migr_verify, mixed" relayed cuts "${CUTS:-4}"
step "resend: the cable is cut: migr_verify, messages and WRITEs" resends write_imm cut down
walk_step "resend: the cable is cut, mended, silent, mended: migr_verify, messages and WRITEs" resends write_imm again_and_again
walk_step "resend: the cable is cut, mended, silent, mended: migr_verify, messages" resends send again_and_again
walk_step "a cable loses a twentieth, and then a fifth" with_container lossy 5 20
MAY_BREAK_OFF=1 walk_step "a cable loses half: migr_verify, messages and WRITEs" with_verify half_lost -- --mode write_imm --qps 4 --size 4096
walk_step "the other rail is preferred, then none: migr_verify, atomics" with_verify preferred -- --mode atomic --qps 4
walk_step "${CUTS:-4} cuts in a row: transactions" with_kv cuts "${CUTS:-4}" -- --qps 8
walk_step "the cable is cut and mended: ib_send_bw" perftest ib_send_bw down
walk_step "the cable is cut and mended: ib_read_bw" perftest ib_read_bw down
walk_step "the cable is cut: migr_verify, READs, with events" with_verify cut down -- --mode read --qps 4 --events
walk_step "the backup's device comes later: migr_verify, messages and WRITEs" late_device
walk_step "the device is removed: migr_verify, messages and WRITEs" device_removed	# last: what peer was told of links is lost with it
links_from ""
e2e_end
