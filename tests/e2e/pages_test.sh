#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# README.md ("How it is used"), docs/getting-started.md as a newcomer goes through it, and docs/operations.md after it: three hosts with a Debian 12 of their
# own and systemd, nothing of migr on them, the packages installed by apt, and then every command of the pages as it stands
# there. Addresses are those of the bed (10.77.0 for 10.0.0), and the program runs for two minutes, not for ten.
set -uo pipefail
export MIGR_BED=${MIGR_HOSTS_BED:-hosts} E2E_WITH=hostA,hostB,hostC E2E_LIMIT=${E2E_LIMIT:-240}
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
PAGE=getting-started				# of docs/, from which block() reads
DEBS=$E2E_ROOT/build/packages
ROOTFS=$E2E_ROOT/build/hosts/root
KVER=$(e2e_kernel) || exit 1
ls "$DEBS"/migr_*.deb >/dev/null 2>&1 || { fail "no packages; run: make packages"; exit 1; }
"$E2E_ROOT/tests/packages/host_root" "$ROOTFS" "$KVER" || exit 1
[ -n "${E2E_KEEP:-}" ] || trap 'testbed down' EXIT
[ -n "${E2E_STEPS:-}" ] || rm -f "$E2E_OUT"/used.*

# block HEADING N: the Nth block below a heading of the page.
block() {
	echo "$1 $2" >>"$E2E_OUT/used.$PAGE"
	awk -v heading="## $1" -v n="$2" '
		/^## / { inside = $0 == heading; next }
		/^ *```/ { fence = !fence; if (fence && inside) k++; next }
		fence && inside && k == n { sub(/^  /, ""); print }
	' "$E2E_ROOT/docs/$PAGE.md" | sed 's/10\.0\.0\./10.77.0./g; s/-D 600/-D 120/g' | grep . || fail "$PAGE: no block $2 below '$1'"
}
# A newcomer types it as root, in the source where the page says so.
type_in() {	# HOST COMMANDS
	on_sh "$1" 'cd "$1" && set -ex && eval "$2"' "$E2E_ROOT" "$2" 2>"$E2E_OUT/$1.typed" || { cat "$E2E_OUT/$1.typed" >&2; return 1; }
}
type_block() {	# HEADING N HOST
	local b
	b=$(block "$1" "$2") && type_in "$3" "$b"
}
line() { sed -n "$1p"; }
# readme N SED: the Nth command of README's block, with the names that it leaves open. Who comes from there alone types these.
readme() {
	local command
	command=$(awk '/^## / { inside = $0 == "## How it is used" } /^```/ { fence = !fence; next } fence && inside' "$E2E_ROOT/README.md" | # block "How it is used" 1
		line "$1" | sed 's/ *#.*//' | sed "$2") && [ -n "$command" ] || fail "README has no command $1" || return 1
	echo "$1" >>"$E2E_OUT/used.README"
	echo "$command"
}
# same_as_readme N SED COMMANDS: it is among these, which are those of a page, or all of its parts are.
same_as_readme() {
	local command part
	command=$(readme "$1" "$2") || return 1
	while read -r part; do
		grep -qxF -- "$part" <<<"$3" || fail "README says '$part', and the page: $3" || return 1
	done < <(sed 's/ *&& */\n/g; s/; */\n/g' <<<"$command")
}
readme_used() {
	local n
	n=$(awk '/^## / { inside = $0 == "## How it is used" } /^```/ { fence = !fence; next } fence && inside' "$E2E_ROOT/README.md" | wc -l)
	[ "$(sort -un "$E2E_OUT/used.README" | xargs)" = "$(seq "$n" | xargs)" ] || fail "of README's $n commands were typed: $(sort -un "$E2E_OUT/used.README" | xargs)"
}

prepared() { type_block "1. What the hosts need" 1 "$1"; }
# The module is built natively, from the package, and comes as a tarball of DKMS: an emulated processor needs five minutes
# for the compiler. MIGR_DKMS_IN_GUEST=1: that is done, too.
install() {	# HOST
	local tar=$E2E_OUT/dkms.tar.gz commands version
	version=$(dpkg-deb -f "$DEBS"/migr_*.deb Version)
	if [ -z "${MIGR_DKMS_IN_GUEST:-}" ]; then
		testbed put "$1" "$tar" /root/ && on_sh "$1" 'mkdir -p /usr/share/migr-dkms && mv /root/dkms.tar.gz "/usr/share/migr-dkms/migr-$1.dkms.tar.gz"' "$version" || return 1
	fi
	commands=$(block "2. Install" 1 | grep -v '^make ') || return 1
	E2E_LIMIT=1200 type_in "$1" "export DEBIAN_FRONTEND=noninteractive; $commands" >"$E2E_OUT/$1.apt" 2>&1 || { tail -n 30 "$E2E_OUT/$1.apt" >&2; return 1; }
	on_sh "$1" 'rm -rf /usr/share/migr-dkms; dpkg --audit'
}
everything_installs() {
	local tar=$E2E_OUT/dkms.tar.gz
	block "2. Install" 1 | grep -qx 'make packages' || fail "who makes the packages?" || return 1
	same_as_readme 1 '' "$(block "2. Install" 1)" || return 1
	[ -n "${MIGR_DKMS_IN_GUEST:-}" ] || [ "$tar" -nt "$(ls "$DEBS"/migr-dkms_*.deb)" ] ||
		"$E2E_ROOT/tests/packages/dkms_build" "$KVER" --tarball "$tar" || return 1
	on_every_host install
}

# Who has installed it and asks is told what comes next.
not_yet() {
	local said
	! said=$(type_in hostA "$(readme 4 '')" 2>/dev/null) && grep -q '/etc/migr/migrd.json' <<<"$said" || fail "doctor, before anything is configured: $said"
}
certificates() {
	local h commands
	same_as_readme 2 's|DIR|/etc/migr/ca|g' "$(block "3. Certificates" 1)" || return 1
	type_block "3. Certificates" 1 hostA >/dev/null || return 1
	for h in "${E2E_HOSTS[@]}"; do
		# As scp would; the host itself has it there.
		[ "$h" = hostA ] || on hostA cat "/root/$h.tar" | testbed exec "$h" -- sh -c 'umask 077 && cat >"$1"' sh "/root/$h.tar" || fail "archive of $h" || return 1
		commands=$(block "3. Certificates" 2 | sed "s/hostB/$h/g") || return 1
		type_in "$h" "$commands" && on_sh "$h" 'stat -c "%a %n" /etc/migr/pki/*' | grep -qx '600 /etc/migr/pki/host.key' || fail "certificate of $h" || return 1
	done
	on_sh hostA 'rm -r /etc/migr/ca /root/host?.tar'
}
configured() {	# HOST
	block "4. The configuration" 1 | sed "s/\"name\": \"hostA\",\$/\"name\": \"$1\",/" | testbed exec "$1" -- sh -c 'cat >/etc/migr/migrd.json' &&
		same_as_readme 3 '' "$(block "4. The configuration" 2)" && type_in "$1" "$(block "4. The configuration" 2 | line 1)" || return 1
	on "$1" ss -Hltn 'sport = :7471' | grep -q . || fail "$1: systemctl start has returned before migrd listens"
}
doctor() {	# HOST
	local said
	said=$(type_in "$1" "$(block "4. The configuration" 2 | line 2)") || { echo "$said" >&2; fail "doctor on $1"; return 1; }
	said=$(on "$1" migrctl doctor --json) && jq -e 'length > 10 and all(.[]; .status == "ok")' <<<"$said" >/dev/null ||
		{ jq -c '.[] | select(.status != "ok")' <<<"$said" >&2; fail "doctor on $1 is not green"; }
}
doctor_is_green() { on_every_host doctor; }

# ---- a process

packets() { on "$1" sh -c 'cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts'; }
more_packets() {	# HOST: than three seconds ago
	local before
	before=$(packets "$1") && sleep 3 && [ "$(packets "$1")" -gt "$before" ]
}
process_of() { on "$1" pgrep -nx "$2"; }
process_started() {
	# Hosts that were started together have given the same numbers: those of their own migrd would be in use on the other.
	on hostA sh -c 'echo 20000 >/proc/sys/kernel/ns_last_pid' || return 1
	readme 5 's/ PROGRAM.*//' | grep -qxF "$(block "5. A program to move" 1 | line 1 | grep -o 'LD_PRELOAD=[^ ]*')" || fail "README has another library" || return 1
	type_in hostA "$(block "5. A program to move" 1 | line 1)" && until_true 30 process_of hostA rping || fail "no rping on hostA" || return 1
	until_true 20 listens hostA 7174 || fail "rping does not listen" || return 1
	type_in hostC "$(block "5. A program to move" 2)" && until_true 30 more_packets hostA || fail "rping does not talk"
}
process_moves() {
	local p said
	p=$(process_of hostA rping) || return 1
	said=$(on hostA migrctl show "$p") && grep -q QP <<<"$said" || fail "show: $said" || return 1
	type_in hostA "$(readme 9 "s/PID/$p/")" >"$E2E_OUT/process" || { cat "$E2E_OUT/process" >&2; return 1; }
	on hostB sh -c "[ \"\$(cat /proc/$p/comm)\" = rping ]" || fail "no process $p on hostB" || return 1
	! process_of hostA rping >/dev/null || fail "rping is on hostA still" || return 1
	on hostB grep -qx "0::/migr-processes" "/proc/$p/cgroup" || fail "its cgroup: $(on hostB cat "/proc/$p/cgroup")" || return 1
	more_packets hostB && process_of hostC rping >/dev/null || fail "rping stands still"
}
# systemd ends a service's processes, and complains about what it finds of another one.
migrd_restarts() {
	local p
	p=$(process_of hostB rping) || return 1
	type_in hostB 'systemctl restart migrd; systemctl is-active migrd' >/dev/null && until_true 30 on hostB migrctl ps || fail "migrd does not come again" || return 1
	on hostB kill -0 "$p" && more_packets hostB || fail "rping has not outlived it" || return 1
	! on hostB journalctl -q -u migrd -g rping | grep -v 'migrd\[' || fail "systemd takes it for a part of migrd" || return 1
	on hostC pkill -x rping
	until_true 30 on_sh hostB '! pgrep -x rping' || on hostB pkill -x rping
}

# ---- a container

container_started() {
	local partner
	partner=$(block "5. A program to move" 3) || return 1
	on_sh hostC 'setsid -f sh -c "$1" </dev/null >/mnt/out/partner.log 2>&1' "$partner" || return 1
	until_true 20 listens hostC 18515 || fail "ib_write_bw does not listen" || return 1
	type_block "5. A program to move" 4 hostA >/dev/null && until_true 60 more_packets hostC || fail "ib_write_bw does not talk"
}
container_moves() {
	local commands said
	commands=$(block "6. Migrate" 1)
	same_as_readme 6 '' "$commands" && same_as_readme 7 's/CONTAINER/bw/' "$commands" || return 1
	said=$(type_in hostA "$(line 1 <<<"$commands")") && grep -qw bw <<<"$said" || fail "ps: $said" || return 1
	said=$(type_in hostA "$(line 2 <<<"$commands")") && grep -q QP <<<"$said" || fail "dry run: $said" || return 1
	[ "$(container_at)" = hostA ] || fail "after the dry run the container is on $(container_at)" || return 1
	type_in hostA "$(line 3 <<<"$commands")" >"$E2E_OUT/container" || { cat "$E2E_OUT/container" >&2; return 1; }
	[ "$(container_at)" = hostB ] || fail "after the migration the container is on $(container_at)" || return 1
	more_packets hostC || fail "ib_write_bw stands still"
}
container_at() {
	local h
	for h in "${E2E_HOSTS[@]}"; do
		[ "$(on "$h" /usr/lib/migr/runc state bw 2>/dev/null | jq -r .status)" != running ] || echo "$h"
	done | xargs
}
# Its result, on both sides.
program_ends_well() {
	until_true 240 on hostB /usr/lib/migr/runc exec bw test -s /tmp/log.status || fail "ib_write_bw does not end" || return 1
	[ "$(on hostB /usr/lib/migr/runc exec bw cat /tmp/log.status)" = 0 ] && on hostB /usr/lib/migr/runc exec bw cat /tmp/log | grep -qE '^ *65536 +[0-9]+ ' ||
		{ on hostB /usr/lib/migr/runc exec bw cat /tmp/log >&2; fail "result of ib_write_bw"; }
}
looked_at() {
	local commands said id
	commands=$(block "7. Look at it" 1)
	same_as_readme 11 '' "$commands" || return 1
	said=$(type_in hostA "$(line 1 <<<"$commands")") || return 1
	id=$(awk '$0 ~ / bw / { print $1 }' <<<"$said" | tail -n 1)
	[ -n "$id" ] || fail "history: $said" || return 1
	on_sh hostA 'cd /root && eval "$1" && cat "migration-$2.html"' "$(line 2 <<<"$commands" | sed "s/ID/$id/")" "$id" >"$E2E_OUT/report.html" &&
		grep -q '<svg' "$E2E_OUT/report.html" && grep -q hostC "$E2E_OUT/report.html" || fail "report"
}

ended() {
	type_block "8. End it" 1 hostB >/dev/null && [ -z "$(container_at)" ] || fail "after the end the container is on $(container_at)" || return 1
	! on hostB sh -c 'ip netns list | grep .' || fail "a network namespace is left on hostB"
}

# ---- the hosts, at the end

# The other end of what an operator takes from a link hears that it fails there.
in_order() {	# HOST
	local bad
	bad=$(on_sh "$1" 'systemctl --failed --no-legend --plain; journalctl -q -p warning -u migrd -t migrd | grep -v "failure told by the other end"; journalctl -q -k -p warning -g migr | grep -v "taints kernel" || true') ||
		fail "$1 cannot be asked" || return 1
	[ -z "$bad" ] || fail "$1: $bad"
}
hosts_in_order() { on_every_host in_order; }
pages_used() {
	local page missed
	for page in getting-started operations; do
		missed=$(awk '/^## / { heading = substr($0, 4); k = 0 } /^ *```/ { fence = !fence; if (fence) print heading, ++k }' "$E2E_ROOT/docs/$page.md" |
			grep -vxFf "$E2E_OUT/used.$page") && fail "blocks of docs/$page.md that were not typed: $missed" && return 1
	done
	readme_used
}

# ---- operations

SERVER=ib_write_bw
sent_over() {	# HOST DEVICE: more packets than two seconds ago
	local f=/sys/class/infiniband/$2/ports/1/hw_counters/sent_pkts before
	before=$(on "$1" cat "$f") && sleep 2 && [ "$(on "$1" cat "$f")" -gt $((before + 20)) ]
}
second_link() {	# HOST
	on "$1" rdma link add rxe1 type rxe netdev eth1 && block "Backup links" 1 | testbed exec "$1" -- sh -c 'cat >/etc/migr/links.json'
}
backup_links() {
	local commands said
	commands=$(block "Backup links" 2)
	on_every_host second_link || return 1
	on_sh hostC 'LD_PRELOAD=/usr/lib/migr/libmigr.so setsid -f "$1" -d rxe0 -F -D 100 </dev/null >/mnt/out/links.log 2>&1' $SERVER
	until_true 20 listens hostC 18515 || fail "$SERVER does not listen" || return 1
	on_sh hostA 'LD_PRELOAD=/usr/lib/migr/libmigr.so setsid -f "$1" -d rxe0 -F -D 100 10.77.0.3 </dev/null >/mnt/out/links.log 2>&1' $SERVER
	until_true 40 sent_over hostA rxe0 || fail "no traffic" || return 1
	until_true 40 on_sh hostA 'migrctl links --json | jq -e ".processes[0] | .vqps > 0 and .with_backup == .vqps"' || fail "no backup" || return 1
	said=$(type_in hostA "$(line 1 <<<"$commands")") && grep -q $SERVER <<<"$said" || fail "links: $said" || return 1
	type_in hostA "$(line 2 <<<"$commands")" && until_true 30 sent_over hostA rxe1 || fail "link down: nothing over rxe1" || return 1
	type_in hostA "$(line 3 <<<"$commands")" && until_true 30 sent_over hostA rxe0 || fail "link up: nothing over rxe0" || return 1
	type_in hostA "$(line 4 <<<"$commands")" && until_true 30 sent_over hostA rxe1 || fail "prefer: nothing over rxe1" || return 1
	type_in hostA "$(line 5 <<<"$commands")" && until_true 30 sent_over hostA rxe0 || fail "prefer --none: nothing over rxe0" || return 1
	until_true 120 on_sh hostA '! pgrep -x "$1"' $SERVER || fail "the program does not end" || return 1
	on hostA grep -qE '^ *65536 +[0-9]+ ' /mnt/out/links.log || { on hostA cat /mnt/out/links.log >&2; fail "its result"; }
	on_every_host no_links
}
no_links() { on "$1" rm /etc/migr/links.json; }

container_removed() {	# HOST
	on_sh "$1" '/usr/lib/migr/runc delete --force bw; [ ! -e /var/lib/bw ] || /usr/lib/migr/migr-net cleanup /var/lib/bw bw; rm -rf /var/lib/bw; ! pkill -KILL -x "$1"' $SERVER
}
host_emptied() {
	local commands said
	on_every_host container_removed
	PAGE=getting-started container_started || return 1
	commands=$(block "Emptying a host" 1)
	same_as_readme 8 '' "$commands" || return 1
	type_in hostA "$commands" >"$E2E_OUT/emptied" || { cat "$E2E_OUT/emptied" >&2; return 1; }
	[ "$(container_at)" = hostB ] && more_packets hostC || fail "the container is on $(container_at)" || return 1
	said=$(on hostA sh -c 'migrctl ps --json | jq length; migrctl recover') && [ "$said" = "0
no open migration" ] || fail "not empty: $said"
}
stored_and_restored() {
	local commands
	commands=$(block "Emptying a host" 2 | sed 's/NAME/bw/g')
	same_as_readme 10 's/CONTAINER|PID/bw/; s|DIR|/srv/checkpoints/bw|g' "$commands" || return 1
	type_in hostB "$(line 1,2 <<<"$commands")" && [ -z "$(container_at)" ] || fail "after the checkpoint the container is on $(container_at)" || return 1
	[ "$(on hostB stat -c %a /srv/checkpoints/bw)" = 700 ] || fail "mode of the checkpoint" || return 1
	type_in hostB "$(line 3 <<<"$commands")" && [ "$(container_at)" = hostB ] || fail "after the restore the container is on $(container_at)"
}
# What goes before a decision of people: tests/e2e/rollback_test.sh and tests/faults/walk make such migrations.
recovered() {
	local commands
	commands=$(block "When migrd or a host dies" 1)
	same_as_readme 12 '' "$commands" || return 1
	[ "$(wc -l <<<"$commands")" = 3 ] && [ "$(type_in hostB "$(line 1 <<<"$commands")")" = "no open migration" ] || fail "recover" || return 1
	! type_in hostB "$(line 2 <<<"$commands" | sed 's/ID/0123abcd/')" 2>/dev/null && ! type_in hostB "$(line 3 <<<"$commands" | sed 's/ID/0123abcd/')" 2>/dev/null ||
		fail "recover of a migration that there never was" || return 1
	on_sh hostB 'migrctl recover 0123abcd 2>/dev/null; [ $? = 3 ]' || fail "a migration that there never was is open"
}
nothing_to_do() {
	local said
	! said=$(type_in hostB "$(readme 13 's/CONTAINER/bw/')" 2>&1) && grep -q 'nothing of that name' "$E2E_OUT/hostB.typed" || fail "cancel: $said" || return 1
	said=$(type_in hostB "$(readme 14 '')") && [ "$said" = "peers and their rights are as they were" ] || fail "reload: $said"
}
purged() {	# HOST
	local commands left
	commands=$(block "Upgrading, removing" 1) || return 1
	E2E_LIMIT=600 on_sh "$1" 'yes | (eval "$1")' "$commands" >"$E2E_OUT/$1.purge" 2>&1 || { tail -n 20 "$E2E_OUT/$1.purge" >&2; return 1; }
	left=$(on_sh "$1" 'grep "^migr " /proc/modules; ls -d /etc/migr /var/lib/migr /run/migr /run/migr.lock /run/migrd /dev/migr /usr/lib/migr /var/lib/dkms/migr /usr/src/migr-* /sys/fs/cgroup/migr-processes 2>/dev/null
		systemctl --failed --no-legend --plain; systemctl is-active -q migrd && echo migrd; true')
	[ "$1" != hostA ] || left=$(grep -v -e "^migr " -e "^/dev/migr$" <<<"$left")	# where bw was started, which has been stored
	[ -z "$left" ] || fail "$1 has still: $left"
}
everything_goes() { on_every_host container_removed; on_every_host purged; }

bed_is_up || testbed up --hosts "$E2E_WITH" --root "$ROOTFS" --rails 1 --mem 1536 --lifetime "${E2E_LIFETIME:-3600}" --kernel "$KVER" || exit 1
step "1: soft-RoCE devices" on_every_host prepared
step "2: apt installs the packages" everything_installs || e2e_end
step "README: doctor says what comes next" not_yet
step "3: certificates" certificates
step "4: migrd, by systemd" on_every_host configured
step "4: doctor has no complaint" doctor_is_green
step "5: a process and its partner" process_started
step "6: the process moves" process_moves
step "a restart of migrd leaves it alone" migrd_restarts
step "5: a container and its partner" container_started
step "6: the container moves" container_moves
step "7: history and report" looked_at
step "the program ends as it should" program_ends_well
step "8: the container ends where it is" ended
PAGE=operations
step "operations: backup links" backup_links
step "operations: a host is emptied" host_emptied
step "no unit has failed, nobody has complained" hosts_in_order
step "operations: a container is stored, and restored" stored_and_restored
step "operations: recover" recovered
step "README: cancel and reload, with nothing to do" nothing_to_do
step "operations: apt purges all" everything_goes
step "every block of the pages was typed, and all that README says" pages_used
e2e_end
