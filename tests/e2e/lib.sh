# shellcheck shell=bash disable=SC2016,SC2015
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Three hosts with everything that a migration needs. Sourced by the end-to-end tests, scripts/demo and scripts/soak.
#
#        mgmt 10.77.0.0/24: migrd <-> migrd, and the containers' own addresses (macvlan on eth0, 10.77.0.101..)
#     ┌──────────────┬──────────────┐
#   src .1         dst .2         peer .3          each: migr.ko, migrd, runc with the series, CRIU with the plugin
#     └──────────────┴──────────────┘
#        rail 0 10.77.10.0/24 rxe0, rail 1 10.77.11.0/24 rxe1: RDMA
#
# A container has the address of its own (it moves with it) and the host's RDMA device. Its partner runs on peer, without
# a container. Both have LD_PRELOAD=libmigr.so; nothing else is done to them.
#
# MIGR_BED names the bed (e2e). A bed that is up already is used as it is: scripts/check starts one for all tests.
# E2E_WITH: its hosts, if it is to have fewer (src,peer); then addresses are other ones.

E2E_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export MIGR_BED=${MIGR_BED:-e2e}
IFS=, read -ra E2E_HOSTS <<<"${E2E_WITH:-src,dst,peer}"
E2E_OUT=$E2E_ROOT/build/e2e/$MIGR_BED		# what tests leave to be looked at
E2E_SNAPSHOT_LIMIT=180				# seconds, for many commands in a host whose programs poll
E2E_LIMIT=${E2E_LIMIT:-120}			# seconds, for a command in a host
E2E_MIGRATE_LIMIT=${E2E_MIGRATE_LIMIT:-360}
E2E_PATIENCE=${E2E_PATIENCE:-3}			# a machine may be so many times slower than waits are written for
# Where things lie in the hosts. Below /usr, which containers see, and the same on every host.
E2E_LIB=/usr/local/lib/migr
E2E_BUNDLES=/var/lib/migr-e2e
E2E_PKI=$E2E_ROOT/build/e2e/pki${E2E_WITH:+-$E2E_WITH}
E2E_IP=10.77.0.101				# of the container, unless CONTAINER_IP says otherwise
E2E_PEER=10.77.0.3
E2E_VARS=()
E2E_PROGRAMS=(migr_verify migr_loaded migr_datagram migr_kv migr_server migr_transfer migr_impostor)	# of build/user/tests/programs
E2E_RATE=${E2E_RATE:-100}			# 0: as fast as it goes
mkdir -p "$E2E_OUT"

note() { echo "# $*" >&2; }
fail() { echo "e2e: $*" >&2; return 1; }
testbed() { "$E2E_ROOT/scripts/testbed" "$@"; }

# on HOST CMD...: in a host, without stdin. on_sh HOST SCRIPT [ARG...]: the same for a bash script.
on() { testbed exec "$1" -n --timeout "$E2E_LIMIT" -- "${@:2}"; }
on_sh() { testbed exec "$1" -n --timeout "$E2E_LIMIT" -- bash -c "$2" bash "${@:3}"; }

# listens HOST PORT: somebody there does, over TCP or librdmacm.
listens() { on_sh "$1" 'ss -Hltn "sport = :$1" | grep -q . || rdma res show cm_id | grep -qE "LISTEN .*:$1( |$)"' "$2"; }

# until_true SECONDS CMD...: repeats CMD, quietly, until it is true.
until_true() {
	local end=$((SECONDS + E2E_PATIENCE * $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || return 1
		sleep 0.3
	done
}

# ---- bringing up

e2e_needs() {
	local f missing=()
	local kver
	kver=$(e2e_kernel) || return 1
	for f in "build/kmod/$kver/migr.ko" build/user/libmigr/libmigr.so build/user/agent/migrd build/user/agent/migrctl \
		build/user/criu-plugin/migr_plugin.so build/runc/runc "${E2E_PROGRAMS[@]/#/build/user/tests/programs/}" build/user/tests/programs/migr_cm; do
		[ -e "$E2E_ROOT/$f" ] || missing+=("$f")
	done
	[ ${#missing[@]} = 0 ] || fail "not built: ${missing[*]}; run: make"
}

e2e_kernel() { echo "${MIGR_KERNEL:-$("$E2E_ROOT/scripts/kernel-versions" | head -n1)}"; }

# In a subshell, whose end frees the lock: beds may come up at the same time.
e2e_pki() (
	h='' n=0 ctl=$E2E_ROOT/build/user/agent/migrctl
	mkdir -p "${E2E_PKI%/*}"
	exec 9>"$E2E_PKI.lock"
	flock -w 60 9 || fail "$E2E_PKI.lock is held by somebody" || return 1
	[ ! -e "$E2E_PKI/ca.pem" ] || return 0
	rm -rf "$E2E_PKI"
	"$ctl" pki init "$E2E_PKI" >/dev/null || fail "migrctl pki init" || return 1
	for h in "${E2E_HOSTS[@]}"; do
		n=$((n + 1))
		"$ctl" pki host "$E2E_PKI" "$h" --ip "10.77.0.$n" >/dev/null || fail "migrctl pki host $h" || return 1
	done
)

# host_setup HOST: after each boot.
host_setup() {
	local h=$1 kver
	kver=$(e2e_kernel) || return 1
	on_sh "$h" '
		set -e
		root=$1 kver=$2 lib=$3 name=$4 pki=$5 programs=$6
		shift 6
		mkdir -p "$lib" /etc/migr/pki /var/lib/migr
		# The root is in memory, too, and does not say so.
		mountpoint -q /var/lib/migr || mount -t tmpfs -o size=80%,mode=700 migr /var/lib/migr
		for p in $programs; do cp --remove-destination "$root/build/user/tests/programs/$p" "$lib/"; done
		cp --remove-destination "$root/build/user/libmigr/libmigr.so" "$root/build/runc/runc" "$lib/"	# in memory: from the 9p root runc takes seconds to start
		ln -sf "$root/build/user/agent/migrctl" /usr/local/sbin/migrctl
		grep -q "^migr " /proc/modules || insmod "$root/build/kmod/$kver/migr.ko"
		for i in $(seq 50); do [ ! -e /dev/migr ] || break; sleep 0.1; done
		cp "$pki/$name"/*.pem "$pki/$name"/*.key /etc/migr/pki/
		chmod 600 /etc/migr/pki/*.key
		{
			echo "{ \"name\": \"$name\", \"peers\": ["
			sep=
			for p in "$@"; do
				echo "$sep{\"name\": \"$p\", \"address\": \"$p:7471\"}"
				sep=,
			done
			echo "], \"runc\": \"$lib/runc\", \"criu_libs\": \"$root/build/user/criu-plugin\","
			echo "  \"libmigr\": \"$lib/libmigr.so\", \"net_hook\": \"$root/hooks/migr-net\" }"
		} >/etc/migr/migrd.json
	' "$E2E_ROOT" "$kver" "$E2E_LIB" "$h" "$E2E_PKI" "${E2E_PROGRAMS[*]}" "${E2E_HOSTS[@]}" || fail "set-up of host $h" || return 1
	migrd_start "$h"
}

# migrd_start HOST [NAME=VALUE...]: with these in its environment. Its log is in the bed's folder.
migrd_start() {
	local h=$1
	shift
	on_sh "$h" '
		root=$1
		shift
		[ $# = 0 ] || export "$@"
		exec setsid -f "$root/build/user/agent/migrd" --config /etc/migr/migrd.json </dev/null >>/mnt/out/migrd.log 2>&1
	' "$E2E_ROOT" "$@" || fail "start of migrd on $h" || return 1
	until_true 60 on "$h" test -S /run/migrd/ctl.sock || {
		tail -n 5 "$(migrd_log "$h")" >&2
		fail "migrd on $h did not open its socket"
	}
}

migrd_kill() {	# HOST [SIGNAL]
	on_sh "$1" 'pkill -"$1" -x migrd; for i in $(seq 600); do pgrep -x migrd >/dev/null || break; sleep 0.1; done
		rm -f /run/migrd/ctl.sock; ! pgrep -x migrd' "${2:-KILL}" || fail "migrd on $1 does not end"
}

migrd_restart() {	# HOST [NAME=VALUE...]
	migrd_kill "$1" TERM && migrd_start "$@"
}

# links_from FILE: what programs that cannot read it, as in containers, hear of backup links from every migrd. Empty: nothing.
links_from() {
	local h add=${1:+"\"links_file\": \"$1\", "}
	for h in "${E2E_HOSTS[@]}"; do
		on "$h" sed -i "s|\"links_file\": \"[^\"]*\", ||; s|\"net_hook\"|$add&|" /etc/migr/migrd.json && migrd_restart "$h" || return 1
	done
}

# with_policy POLICY DO..: programs in containers have it, and a backup link that no host has.
with_policy() {
	local h r=0 E2E_VARS=("MIGR_POLICY=$1")
	for h in "${E2E_HOSTS[@]}"; do on_sh "$h" 'echo "{\"links\": [{\"device\": \"rxe0\"}, {\"device\": \"rxe9\"}]}" >/tmp/links.json' || return 1; done
	links_from /tmp/links.json && "${@:2}" || r=1
	links_from "" && return $r
}

bed_is_up() { testbed status >/dev/null 2>&1; }

# e2e_up: the bed with its hosts. Takes it down at the end of the script if it was not up before.
e2e_up() {
	local h
	e2e_needs || return 1
	e2e_pki || return 1
	if bed_is_up; then
		e2e_reset
		return
	fi
	[ -n "${E2E_KEEP:-}" ] || trap 'testbed down' EXIT
	testbed up --hosts "${E2E_WITH:-src,dst,peer}" --rails 2 --mem "${E2E_MEM:-1024}" --lifetime "${E2E_LIFETIME:-5400}" \
		--kernel "$(e2e_kernel)" || return 1
	for h in "${E2E_HOSTS[@]}"; do rm -f "$E2E_ROOT/build/testbed/$MIGR_BED/$h/out"/*; done
	on_every_host host_setup || fail "not every host could be set up"
}
on_every_host() {	# CMD..: with each as its last argument, at the same time; fails if one of them does
	local h pids=() ok=0
	for h in "${E2E_HOSTS[@]}"; do
		"$@" "$h" &
		pids+=($!)
	done
	for h in "${pids[@]}"; do wait "$h" || ok=1; done
	return $ok
}

# e2e_reset: no container, no program of a test, every host up with its migrd; what a test before has left is gone.
e2e_reset() { on_every_host reset_host; }
reset_host() {	# HOST
	local h=$1
	if ! on "$h" true >/dev/null 2>&1; then
		note "host $h is down; starting it again"
		testbed boot "$h" && host_setup "$h"
		return
	fi
	on_sh "$h" '
		bundles=$1 root=$2 lib=$3
		for b in "$bundles"/*/; do
			[ -e "$b/config.json" ] || continue
			id=$(basename "$b")
			"$lib/runc" delete --force "$id" 2>/dev/null
			"$root/hooks/migr-net" cleanup "$b" "$id" 2>/dev/null
		done
		rm -rf "${bundles:?}"/*
		for p in $4 ib_{write,send,read,atomic}_bw rate_sampler criu; do pkill -KILL -x "$p"; done
		true
	' "$E2E_BUNDLES" "$E2E_ROOT" "$E2E_LIB" "${E2E_PROGRAMS[*]}" >/dev/null
	if ! on_sh "$h" 'p=$(pgrep -x migrd) && ! tr "\0" "\n" <"/proc/$p/environ" | grep -q ^MIGR_FAULT='; then
		migrd_restart "$h" || return 1
	fi
	on_sh "$h" "grep -q '^migr ' /proc/modules" || host_setup "$h"
}

# ---- containers and partners

# start_container HOST ID CMD...: CMD with libmigr in a container; its output is in the container's /tmp/log.
# CONTAINER_IP may say otherwise; CONTAINER_ENV=none: without libmigr; CONTAINER_RDMA="uverbs0 uverbs1": its devices;
# CONTAINER_ANNOTATION="uverbs0": it gets these, and the library, by migr-inject; CONTAINER_WRITABLE=1: its root filesystem;
# CONTAINER_PIPED=1: its standard output is a pipe, kept as descriptor 3; what comes out of it is in /tmp/piped of the host. E2E_VARS: NAME=VALUE.. for both ends.
start_container() {
	local h=$1 id=$2
	shift 2
	local preload=(env "LD_PRELOAD=$E2E_LIB/libmigr.so" "${E2E_VARS[@]}") devices=() d
	for d in ${CONTAINER_RDMA:-uverbs0}; do devices+=(--rdma "$d"); done
	[ "${CONTAINER_ENV:-}" != none ] || preload=(env)
	[ -z "${CONTAINER_ANNOTATION:-}" ] || { devices=(--rdma none); preload=(env "${E2E_VARS[@]}"); }
	on_sh "$h" '
		set -e
		root=$1 bundle=$2/$3 id=$3 ip=$4 devices=$5 annotation=$6 writable=$7 piped=$8
		shift 8
		rm -rf "$bundle"
		mkdir -p "$(dirname "$bundle")"
		"$root/scripts/make-bundle" "$bundle" --netns-ip "$ip/24" --parent eth0 $devices --linger -- "$@"
		if [ -n "$annotation" ]; then	# (jq rounds numbers of 64 bits)
			sed -i "s/\"annotations\": {/&\"org.migr.rdma\": \"$annotation\", /" "$bundle/config.json"
			"$root/hooks/migr-inject" "$bundle"
		fi
		[ -z "$writable" ] || sed -i "s/\"readonly\": true/\"readonly\": false/" "$bundle/config.json"
		"$root/hooks/migr-net" prepare "$bundle" "$id"
		"$root/hooks/migr-net" attach "$bundle" "$id"
		out=/dev/null
		if [ -n "$piped" ]; then
			sed -i "s|exec </dev/null|exec 3>\&1 </dev/null|" "$bundle/config.json"
			exec {out}> >(exec setsid cat >/tmp/piped 2>/dev/null)
			out=/dev/fd/$out
		fi
		/usr/local/lib/migr/runc run --detach --bundle "$bundle" "$id" </dev/null >"$out" 2>/tmp/runc.err ||
			{ cat /tmp/runc.err >&2; exit 1; }
	' "$E2E_ROOT" "$E2E_BUNDLES" "$id" "${CONTAINER_IP:-$E2E_IP}" "${devices[*]}" "${CONTAINER_ANNOTATION:-}" "${CONTAINER_WRITABLE:-}" "${CONTAINER_PIPED:-}" "${preload[@]}" "$@" || fail "start of container $id on $h"
}

host_is_down() { testbed status --json | jq -e --arg h "$1" '.hosts[] | select(.host == $h) | .state | IN("up", "failed") | not' >/dev/null; }	# HOST
# container_status HOST ID: nothing if it is not there, or its host is down; an error if that is not known.
container_status() {
	local said status=0
	said=$(on "$1" "$E2E_LIB/runc" state "$2" 2>/dev/null) || status=$?
	[ $status -le 1 ] || host_is_down "$1" || fail "host $1 did not say how container $2 is: status $status" || return
	jq -r .status <<<"$said"
}
container_exec() { on "$1" "$E2E_LIB/runc" exec "$2" "${@:3}"; }			# HOST ID CMD...
container_log() { container_exec "$1" "$2" cat /tmp/log; }						# HOST ID

# container_host ID: the host that it runs on; an error if it is none, or (worse) two.
container_host() {
	local h status found=() elsewhere=()
	for h in "${E2E_HOSTS[@]}"; do
		status=$(container_status "$h" "$1") || return 1
		[ "$status" = running ] && found+=("$h") || elsewhere+=("$h: ${status:-not there}")
	done
	[ ${#found[@]} = 1 ] || fail "container $1 runs on ${#found[@]} hosts: ${found[*]:-none} (${elsewhere[*]:-})" || return 1
	echo "${found[0]}"
}

expect_running() {	# ID HOST
	local at
	at=$(container_host "$1") || return 1
	[ "$at" = "$2" ] || fail "container $1 runs on $at, not on $2"
}

# container_wait HOST ID SECONDS: until its program has ended. @return its exit status
container_wait() {
	local status
	until_true "$3" container_exec "$1" "$2" test -s /tmp/log.status || { fail "the program of container $2 did not end within $3 s"; return 99; }
	status=$(container_exec "$1" "$2" cat /tmp/log.status)
	return "${status:-98}"
}

container_remove() {	# HOST ID
	on_sh "$1" '/usr/local/lib/migr/runc delete --force "$3"; "$1/hooks/migr-net" cleanup "$2/$3" "$3"; rm -rf "${2:?}/$3"' \
		"$E2E_ROOT" "$E2E_BUNDLES" "$2"
}

# start_peer NAME CMD...: CMD with libmigr on peer. Its output: peer_log NAME; its exit status: peer_wait. PEER_ENV=none:
# without libmigr.
start_peer() {
	local name=$1 lib=$E2E_LIB/libmigr.so
	[ "${PEER_ENV:-}" != none ] || lib=
	shift
	on_sh peer '
		name=$1 lib=$2
		shift 2
		rm -f "/mnt/out/$name".*
		exec setsid -f bash -c "
			env LD_PRELOAD=\$1 \"\${@:3}\" >/mnt/out/\$2.log 2>&1 </dev/null
			echo \$? >/mnt/out/\$2.status
		" bash "$lib" "$name" "$@" </dev/null >/dev/null 2>&1
	' "$name" "$lib" "${E2E_VARS[@]}" "$@" || fail "start of $name on peer"
}
peer_file() { echo "$E2E_ROOT/build/testbed/$MIGR_BED/peer/out/$1"; }
peer_log() { cat "$(peer_file "$1.log")"; }
peer_wait() {	# NAME SECONDS: @return the exit status of the program
	until_true "$2" test -s "$(peer_file "$1.status")" || { fail "$1 on peer did not end within $2 s"; return 99; }
	return "$(cat "$(peer_file "$1.status")")"
}

# visit OPTION..: a client on peer of the migr_server that runs in a container, wherever that is; all has to be in order,
# and a key that it was not given has to open nothing.
visit() {
	local said
	said=$(on_sh peer 'LD_PRELOAD=$1/libmigr.so exec timeout "$2" "$1/migr_server" --dev rxe0 "${@:3}"' "$E2E_LIB" $((E2E_LIMIT - 20)) "$@" "$E2E_IP" 2>&1) &&
		grep '^{' <<<"$said" | jq -e '.errors == 0 and .clients == 1' >/dev/null || { echo "$said" >&2; fail "client $*"; }
}

# start_process HOST NAME CMD...: without a container, with libmigr and a process number that is likely to be free on every
# host, which it prints. Its files are /tmp/NAME.* there; those of before are removed.
start_process() {
	on_sh "$1" '
		name=$1 lib=$2
		shift 2
		rm -f "/tmp/$name".*
		echo $((20000 + RANDOM % 10000)) >/proc/sys/kernel/ns_last_pid
		cd / && setsid -f bash -c "
			echo \$\$ >/tmp/\$1.pid
			exec env LD_PRELOAD=\$2 \"\${@:3}\"
		" bash "$name" "$lib" "$@" </dev/null >/dev/null 2>&1
		for i in $(seq 50); do [ ! -s "/tmp/$name.pid" ] || break; sleep 0.1; done
		cat "/tmp/$name.pid"
	' "$2" "$E2E_LIB/libmigr.so" "${@:3}" || fail "start of $2 on $1"
}

# ---- the verifying application in a container on HOST, its partner on peer

# VERIFY_PROCESSES: so many of them in one container, each with its partner.
VERIFY_PROCESSES=${VERIFY_PROCESSES:-1}
# VERIFY_PROGRAM: migr_datagram and migr_loaded have the same options and results.
VERIFY_PROGRAM=${VERIFY_PROGRAM:-migr_verify}
verify_names() { local k; for ((k = 1; k <= VERIFY_PROCESSES; k++)); do echo "verify${k#1}"; done; }

# start_verify HOST ID OPTION...: options of migr_verify, for both ends where both need them. The traffic is held at
# E2E_RATE work requests per second and end: emulated hosts share their processors, and migrating needs some, too.
start_verify() {
	local h=$1 id=$2
	shift 2
	[ "${E2E_RATE:-0}" = 0 ] || set -- --rate $((E2E_RATE / VERIFY_PROCESSES)) "$@"
	[[ " $* " != *" --transport uc "* ]] || set -- --lossless "$@"	# the network of the beds is their memory
	local both=() o name port=18525
	for o in "$@"; do
		case $o in --events|--wr-api|--atomic-write|--rnr|--srq|--no-limit|--any-order|--windows|--invalidate|--rereg=*|--retries=*|--query) both+=("$o") ;; esac
	done
	[ "$VERIFY_PROGRAM" != migr_datagram ] || [ "${E2E_RATE:-0}" = 0 ] || both+=(--rate "$E2E_RATE")	# of migr_verify the client says it
	on_sh peer 'rm -f /tmp/verify*.status'
	for name in $(verify_names); do
		start_peer "$name" "$E2E_LIB/$VERIFY_PROGRAM" --dev rxe0 --connect 60 --stall 240 --port $((port++)) \
			--status "/tmp/$name.status" --samples "/mnt/out/$name.samples" --json "/mnt/out/$name.json" "${both[@]}" || return 1
	done
	# shellcheck disable=SC2016
	start_container "$h" "$id" bash -c '
		bad=0 pids=()
		for ((k = 0; k < $1; k++)); do "${@:2}" --port $((18525 + k)) & pids+=($!); done
		for p in "${pids[@]}"; do wait "$p" || bad=$?; done
		exit $bad
	' bash "$VERIFY_PROCESSES" "$E2E_LIB/$VERIFY_PROGRAM" --dev rxe0 --stall 240 --stop-file /tmp/stop "$@" "$E2E_PEER" || return 1
	until_true "${E2E_START_LIMIT:-60}" verify_moves || { peer_log verify >&2; container_log "$h" "$id" >&2; fail "no traffic between container $id and peer"; }
}

# shellcheck disable=SC2046 # names of one word
verify_bytes() { on_sh peer 'for n in "$@"; do cat "/tmp/$n.status" || exit 1; done' $(verify_names | xargs) 2>/dev/null | jq -r .bytes; }
# Every one of them has more than a second ago.
verify_moves() {
	local a b
	a=$(verify_bytes)
	[ "$(wc -w <<<"$a")" = "$VERIFY_PROCESSES" ] && sleep 1 && b=$(verify_bytes) && [ "$(wc -w <<<"$b")" = "$VERIFY_PROCESSES" ] &&
		paste <(echo "$a") <(echo "$b") | awk '$2 <= $1 {bad = 1} END {exit bad}'
}

# expect_traffic: bytes go on to flow, and neither end has found a fault.
expect_traffic() {
	local s name
	until_true 30 verify_moves || { on_sh peer 'cat /tmp/verify*.status' >&2; peer_log verify >&2; fail "the traffic has stopped"; return 1; }
	for name in $(verify_names); do
		s=$(on peer cat "/tmp/$name.status")
		[ "$(jq -r .errors <<<"$s")" = 0 ] || fail "fault found by the partner $name: $(jq -r .first_error <<<"$s")" || return 1
	done
}

# stop_verify ID: ends it, and checks what both ends say: also that of UC nothing was lost, for the rails lose nothing. The results: $E2E_OUT/ID.{container,peer}.json
stop_verify() {
	local id=$1 h bad=0 name
	h=$(container_host "$id") || return 1
	container_exec "$h" "$id" touch /tmp/stop
	container_wait "$h" "$id" 120 || bad=$?
	container_exec "$h" "$id" sh -c 'grep "^{" /tmp/log' >"$E2E_OUT/$id.container.json"
	[ $bad = 0 ] || { container_log "$h" "$id" >&2; fail "migr_verify in container $id ended with status $bad"; return 1; }
	: >"$E2E_OUT/$id.peer.json"
	for name in $(verify_names); do
		peer_wait "$name" 60 || { bad=$?; peer_log "$name" >&2; fail "migr_verify on peer ended with status $bad"; return 1; }
		cat "$(peer_file "$name.json")" >>"$E2E_OUT/$id.peer.json"
	done
	cp "$(peer_file verify.samples)" "$E2E_OUT/$id.samples"
	jq -es --argjson n $((2 * VERIFY_PROCESSES)) \
		'length == $n and all(.[]; .errors == 0 and .wr_posted == .wr_completed and .wr_posted > 0 and (.passed_over // 0) == 0)' \
		"$E2E_OUT/$id.container.json" "$E2E_OUT/$id.peer.json" >/dev/null ||
		{ cat "$E2E_OUT/$id".*.json >&2; fail "container $id: not every work request was completed without a fault"; return 1; }
	container_remove "$h" "$id"
}

# expect_invalidated ID: stopped; of its windows the partner has ended many, and it of the partner's.
expect_invalidated() {
	jq -es 'all(.[]; .invalidated > 10)' "$E2E_OUT/$1.container.json" "$E2E_OUT/$1.peer.json" >/dev/null ||
		{ cat "$E2E_OUT/$1".*.json >&2; fail "too few memory windows were invalidated"; }
}

# ---- pairs: both ends in containers, NAME-a and NAME-b, each on any host

pair_ip() {	# NAME END: of the container, the same wherever it is
	local n
	n=$(cksum <<<"$1")
	echo "10.77.0.$((110 + ${n%% *} % 70 * 2 + ($(printf %d "'$2") - 97)))"
}

# since_kernel VERSION LACK COMMAND..: runs it where soft-RoCE is at least of that kernel; 77 where it is not.
since_kernel() {
	local kernel
	kernel=$(on src uname -r) || return 1
	[ "$(printf '%s\n' "$1" "$kernel" | sort -V | head -1)" = "$1" ] || { note "soft-RoCE of $kernel $2"; return 77; }
	"${@:3}"
}

# start_pair NAME HOST_A HOST_B OPTION...: migr_verify in both; the options are those of NAME-a, the client.
start_pair() {
	local name=$1 a=$2 b=$3 o both=()
	shift 3
	[ "${E2E_RATE:-0}" = 0 ] || set -- --rate "$E2E_RATE" "$@"
	for o in "$@"; do
		case $o in --events|--wr-api|--rnr) both+=("$o") ;; esac
	done
	CONTAINER_IP=$(pair_ip "$name" b) start_container "$b" "$name-b" "$E2E_LIB/migr_verify" --dev rxe0 --connect 60 --stall 240 \
		--status /tmp/status "${both[@]}" || return 1
	CONTAINER_IP=$(pair_ip "$name" a) start_container "$a" "$name-a" "$E2E_LIB/migr_verify" --dev rxe0 --stall 240 \
		--stop-file /tmp/stop --status /tmp/status "$@" "$(pair_ip "$name" b)" || return 1
	until_true 60 pair_moves "$name" || { pair_logs "$name"; fail "no traffic between $name-a and $name-b"; }
}
pair_logs() {
	local e
	for e in a b; do
		echo "--- $1-$e:" >&2
		container_log "$(container_host "$1-$e")" "$1-$e" >&2
	done
}
pair_status() { container_exec "$(container_host "$1")" "$1" cat /tmp/status; }	# CONTAINER
pair_moves() {
	local x y
	x=$(pair_status "$1-b" | jq -r .bytes) && sleep 1 && y=$(pair_status "$1-b" | jq -r .bytes) && [ "$y" -gt "$x" ]
}
pair_traffic() {	# NAME: bytes go on to flow, and neither end has found a fault
	local e s
	until_true 30 pair_moves "$1" || { pair_logs "$1"; fail "the traffic of $1 has stopped"; return 1; }
	for e in a b; do
		s=$(pair_status "$1-$e")
		[ "$(jq -r .errors <<<"$s")" = 0 ] || fail "fault found by $1-$e: $(jq -r .first_error <<<"$s")" || return 1
	done
}
# stop_pair NAME: ends it, and checks what both ends say.
stop_pair() {
	local name=$1 e h bad
	container_exec "$(container_host "$name-a")" "$name-a" touch /tmp/stop
	for e in a b; do
		h=$(container_host "$name-$e") || return 1
		bad=0
		container_wait "$h" "$name-$e" 120 || bad=$?
		container_exec "$h" "$name-$e" sh -c 'grep "^{" /tmp/log' >"$E2E_OUT/$name-$e.json"
		[ $bad = 0 ] || { pair_logs "$name"; fail "migr_verify in $name-$e ended with status $bad"; return 1; }
		jq -e '.errors == 0 and .wr_posted == .wr_completed and .wr_posted > 0' "$E2E_OUT/$name-$e.json" >/dev/null ||
			{ cat "$E2E_OUT/$name-$e.json" >&2; fail "$name-$e: not every work request was completed without a fault"; return 1; }
	done
	for e in a b; do container_remove "$(container_host "$name-$e")" "$name-$e"; done
}

# ---- migration

# at_once CMD.. -- CMD..: both at the same time; fails if one of them does.
at_once() {
	local beside=() ok=0
	while [ "$1" != -- ]; do beside+=("$1"); shift; done
	shift
	"${beside[@]}" &
	local pid=$!
	"$@" || ok=1
	wait $pid || ok=1
	return $ok
}

# MIGRATE_OPTIONS: more of them. migrate ID TO [OUT.json]: @return the status of migrctl; its JSON goes to OUT.json, progress to stderr.
migrate() {
	local from
	from=$(container_host "$1") || return 99
	testbed exec "$from" -n --timeout "$E2E_MIGRATE_LIMIT" -- migrctl migrate "$1" --to "$2" ${MIGRATE_OPTIONS:-} --json >"${3:-$E2E_OUT/migrate.json}"
}

migrate_ok() {	# ID TO [OUT.json]
	local out=${3:-$E2E_OUT/migrate.json} status=0
	migrate "$1" "$2" "$out" || status=$?
	[ $status = 0 ] || { cat "$out" >&2; e2e_logs; fail "migrctl migrate $1 --to $2 ended with status $status"; return 1; }
	jq -e '.migrated == true' "$out" >/dev/null || { cat "$out" >&2; fail "no migration, though migrctl ended with status 0"; return 1; }
	expect_running "$1" "$2"
}

# migrate_refused ID TO PATTERN [STATUS]: fails with one clear line that matches PATTERN, before anything is touched (status 3),
# or, with 1, after what was done was taken back.
migrate_refused() {
	local out=$E2E_OUT/refused.json err=$E2E_OUT/refused.err status=0
	migrate "$1" "$2" "$out" 2>"$err" || status=$?
	[ $status = "${4:-3}" ] || { cat "$err" >&2; fail "migrctl migrate $1 --to $2 ended with status $status, not ${4:-3}"; return 1; }
	grep -qiE "$3" "$err" "$out" || { cat "$err" "$out" >&2; fail "the error does not say '$3'"; return 1; }
	grep -hiE "$3" "$err" "$out" | head -n1 | sed 's/^/# says: /'
}

# What the migrd of a host has said since a mark: MARK=$(log_mark HOST); log_since HOST MARK.
migrd_log() { echo "$E2E_ROOT/build/testbed/$MIGR_BED/$1/out/migrd.log"; }	# HOST
log_mark() { stat -c %s "$(migrd_log "$1")" 2>/dev/null || echo 0; }
log_since() { tail -c +$(($2 + 1)) "$(migrd_log "$1")"; }

# e2e_logs: to stderr, what every migrd has said since the last call, and the program in each container
e2e_logs() {
	local h log mark
	for h in "${E2E_HOSTS[@]}"; do
		log=$(migrd_log "$h")
		mark=$(cat "$log.seen" 2>/dev/null || echo 0)
		echo "--- migrd on $h:" >&2
		log_since "$h" "$mark" | tail -n 40 >&2
		log_mark "$h" >"$log.seen"
		on_sh "$h" 'for c in $(ls /run/runc); do echo "--- container $c:"; timeout 20 "$1/runc" exec "$c" tail -n 20 /tmp/log; done' "$E2E_LIB" >&2
	done
}

# doctor_says STATUS FILTER [OPTION...]: of migrctl doctor on src, of whose JSON the filter of jq has to be true.
doctor_says() {
	local status=0 wanted=$1 filter=$2
	shift 2
	on src migrctl doctor "$@" --json >"$E2E_OUT/doctor.json" || status=$?
	[ $status = "$wanted" ] && jq -e "$filter" "$E2E_OUT/doctor.json" >/dev/null ||
		{ jq -c '.[] | select(.status != "ok")' "$E2E_OUT/doctor.json" >&2; fail "migrctl doctor ended with status $status, or does not say $filter"; }
}

# private_files HOST PATTERN..: nobody but root can read or write what migrd keeps there, images, logs and journal; files with these
# names are among it. Bundles are copied with the modes that they have; where CRIU mounts cgroups is below a closed folder.
private_files() {
	local open
	open=$(on_sh "$1" '
		cd /var/lib/migr && find . \( -name bundle -o -name ".criu.cgyard.*" \) -prune -o ! -type l -perm /077 -printf "%m %p\n"
		for p in "$@"; do find . -type f -name "$p" | grep -q . || echo "no $p"; done' "${@:2}") && [ -z "$open" ] ||
		{ fail "/var/lib/migr on $1: $open"; return 1; }
}

# ---- what must not be left

console_clean() {
	local bad
	bad=$(testbed check --new) || { echo "$bad" >&2; fail "a kernel has complained"; return 1; }
}

# leak_snapshot HOST: a line per thing that must be the same before and after. Containers must be gone.
leak_snapshot() {
	E2E_LIMIT=$E2E_SNAPSHOT_LIMIT on_sh "$1" '
		renice -n -15 $$ >/dev/null	# programs poll there: many short commands took a minute beside them
		for kind in ctx pd mr cq qp srq cm_id; do
			echo "kind $kind"
			rdma res show "$kind" 2>/dev/null
		done | awk "\$1 == \"kind\" { k = \$2; n[k] += 0; next } !/comm \[/ { n[k]++ } END { for (k in n) print \"rdma_\" k, n[k] }"
		migrctl version --json | jq -r ".module | to_entries[] | \"module_\" + .key + \" \" + (.value | tostring)"
		# Connections to peers come and go, and it opens a file or asks the kernel now and then; what else migrd has open must not grow.
		for n in 1 2 3 4 5; do
			echo $(($(ls /proc/$(pgrep -x migrd)/fd | wc -l) - $(ss -Htnp | grep -c "\"migrd\"")))
			sleep 0.2
		done | sort -n | sed "s/^/migrd_fds /;q"
		user_processes=$(ps --deselect --ppid 2 -p 2 -o comm=)
		echo "$user_processes" | sort | uniq -c | sed "s/^ *\([0-9]*\) \(.*\)/process_\2 \1/"
		echo "runc $(ls /run/runc 2>/dev/null | wc -l)"
		echo "namespaces $(ip netns list | wc -l)"
		echo "cgroups $(find /sys/fs/cgroup/migr -mindepth 1 -type d 2>/dev/null | wc -l)"
		echo "mounts $(grep -vc " /run/netns " /proc/mounts)"	# whose own stays
		echo "gates $(ls /run/migr | grep -c ^gate-)"
		echo "module_users $(sed -n "s/^migr [0-9]* \([0-9]*\) .*/\1/p" /proc/modules)"
		open=$(migrctl recover --json) || exit 1
		echo "open $(jq length <<<"$open")"
		echo "folders $(find /var/lib/migr/source /var/lib/migr/dest -mindepth 1 -maxdepth 1 2>/dev/null | wc -l)"
		filters=$(nft list ruleset && iptables -S && ip6tables -S) || exit 1
		echo "filters $(wc -l <<<"$filters")"
		echo "addresses $(ip -o addr | wc -l)"
	'
}

# leaks_compare BEFORE AFTER: prints the lines that differ; an error if there are any.
leaks_compare() {
	local d
	d=$(diff <(sort "$1") <(sort "$2")) && return
	sed -n 's/^< /before: /p; s/^> /after:  /p' <<<"$d" >&2
	fail "something was left behind: $(basename "$2")"
}

# traffic_snapshot HOST: a line per thing that must not become more from migration to migration. Only of one migrd: it may be started again.
traffic_snapshot() {
	E2E_LIMIT=$E2E_SNAPSHOT_LIMIT on_sh "$1" '
		renice -n -15 $$ >/dev/null
		for kind in qp cq mr; do echo "rdma_$kind $(rdma res show "$kind" | grep -vc "comm \[")"; done
		for name in migrd "$1"; do
			pid=$(pgrep -o -x "$name") || continue
			[ "$name" != migrd ] || name=migrd_$pid
			echo "${name}_fds $(ls "/proc/$pid/fd" | wc -l)"
			sed -n "s/^Threads:[[:space:]]*/${name}_threads /p; s/^VmRSS:[[:space:]]*\([0-9]*\) kB/${name}_rss_kb \1/p" "/proc/$pid/status"
		done
	' "$VERIFY_PROGRAM"
}

# grown FIRST NOW: an error if NOW has more of something than FIRST, beside what comes and goes in a program; prints it.
grown() {
	local more
	more=$(awk '
		NR == FNR { first[$1] = $2; next }
		!($1 in first) { next }
		{ most = first[$1] }
		$1 ~ /_(fds|threads)$/ { most += 8 }
		$1 ~ /_rss_kb$/ { most = most * 1.5 + 32768 }
		$2 > most { print $1 ": " first[$1] " at first, now " $2 }
	' "$1" "$2") && [ -z "$more" ] && return
	echo "$more" >&2
	fail "it becomes more: $(basename "$2")"
}

# ---- tests: step NAME CMD... prints "ok" or "not ok"; the script ends with e2e_end

E2E_FAILED=0 E2E_RAN=0
# E2E_STEPS: only those whose names match this extended regular expression.
step() {
	local name=$1 t0=$SECONDS status=0
	[[ $name =~ ${E2E_STEPS:-} ]] || return 0
	shift
	E2E_RAN=$((E2E_RAN + 1))
	"$@" || status=$?
	if [ $status = 0 ]; then
		echo "ok $name ($((SECONDS - t0)) s)"
	elif [ $status = 77 ]; then
		echo "skipped $name"
	else
		echo "not ok $name ($((SECONDS - t0)) s)"
		E2E_FAILED=$((E2E_FAILED + 1))
		return 1
	fi
}
# A step for which `make check` has no time: another shows the same in part. make shapes
walk_step() { [ -z "${E2E_WALK:-}" ] || step "$@"; }
e2e_end() {
	[ $E2E_RAN != 0 ] || { fail "no step is called '${E2E_STEPS:-}'"; exit 1; }
	E2E_STEPS='' step "no kernel complained" console_clean
	exit $((E2E_FAILED != 0))
}
