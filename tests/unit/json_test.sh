#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# shellcheck disable=SC2015 # not_ok does not fail
# migrctl --json where nothing can work: no migrd, no configuration, no module, not root. Every command that it has prints one JSON
# document, also when it fails: {"error": .., "status": ..}, beside the sentence on standard error. And colour is for terminals.
#   json_test.sh MIGRCTL
set -uo pipefail
ctl=$1
bad=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
not_ok() { echo "not ok: $*"; bad=1; }

commands_of() { "$ctl" "$@" --help | sed -n '/^Subcommands:/,$s/^  \([^ ]*\) .*/\1/p'; }

# What each command needs besides --json; nobody has any of it here. A command that is not in this list has no test.
words_of() {
	case $* in
	migrate) echo nobody --to nowhere ;;
	drain) echo --to nowhere ;;
	cancel) echo nobody ;;
	checkpoint) echo nobody "$dir/out" ;;
	restore) echo "$dir/none" ;;
	report) echo 0a1b2c3d ;;
	recover) echo 0a1b2c3d --commit ;;
	show) echo 4194304 ;;
	"link down"|"link up"|"links prefer") echo rxe9 ;;
	"pki init") echo "$dir/none/ca" ;;
	"pki host") echo "$dir/none" host ;;
	links|history|ps|peers|reload|doctor|version) ;;
	*) return 1 ;;
	esac
}

# asked USER WORD...: migrctl as that user; its status, and its output in $dir/out.json and $dir/err
asked() {
	local as=()
	[ "$1" = root ] || as=(setpriv --reuid 65534 --regid 65534 --clear-groups --)
	"${as[@]}" "$ctl" --socket "$dir/no.sock" --config "$dir/config.json" "${@:2}" >"$dir/out.json" 2>"$dir/err" </dev/null
	status=$?
}

# A host on which nothing is: no socket, and what was migrated before cannot be read.
touch "$dir/file"
echo "{\"name\": \"h\", \"state_dir\": \"$dir/file/state\", \"pki\": \"$dir/none\"}" >"$dir/config.json"

check() {	# USER COMMAND...
	local words
	words=$(words_of "${@:2}") || { not_ok "nothing is known of: migrctl ${*:2}"; return; }
	# shellcheck disable=SC2086 # words
	asked "$1" "${@:2}" $words --json
	[ "$(jq -s length "$dir/out.json" 2>/dev/null)" = 1 ] || { not_ok "as $1, ${*:2} prints not one JSON document: $(cat "$dir/out.json")"; return; }
	case "${*:2}" in
	version) [ $status = 0 ] && jq -e '.migrctl.release and .migrd == null' "$dir/out.json" >/dev/null || not_ok "as $1, ${*:2}: $status $(cat "$dir/out.json")" ;;
	doctor) [ $status = 1 ] && jq -e 'length > 0 and any(.[]; .status == "failed" and .advice)' "$dir/out.json" >/dev/null || not_ok "as $1, ${*:2}: $status $(cat "$dir/out.json")" ;;
	*)
		[ $status = 3 ] && jq -e --argjson status $status '(.error | length > 10) and .status == $status' "$dir/out.json" >/dev/null ||
			not_ok "as $1, ${*:2}: $status $(cat "$dir/out.json")"
		[ "$(cat "$dir/err")" = "migrctl: $(jq -r .error "$dir/out.json")" ] || not_ok "as $1, ${*:2}: the sentence is another one: $(cat "$dir/err")"
		;;
	esac
}

users=(root)
[ "$(id -u)" != 0 ] || { users+=(nobody); chmod 755 "$dir"; }
n=0
for c in $(commands_of); do
	sub=$(commands_of "$c")
	for s in $sub; do for u in "${users[@]}"; do check "$u" "$c" "$s"; n=$((n + 1)); done; done
	case $c in link|pki) ;; *) for u in "${users[@]}"; do check "$u" "$c"; n=$((n + 1)); done ;; esac
done
[ $n -gt 15 ] || not_ok "migrctl --help names no commands"

# A wrong command line, whether or not --json has been read by then, and whoever asks.
for line in "migrate c --json" "--json" "show no --json" "show --json --none 7" "links prefer --json rxe0 --none" "migrate --to dst --json --drain-limit 0 c" "nothing --json" \
	"migrate --to dst --json" "migrate c --to dst --max-stop 0 --json" "drain --json" "drain --to dst --pid 7 --json" "recover --commit --json" "recover --rollback --force --json" "recover web --json" "report 123456789 --json" "report 0x --json" \
	"link down rxe0/0 --json" "link up rxe0/ --json" "links prefer rxe0/one --json"; do
	for user in "${users[@]}"; do
		# shellcheck disable=SC2086 # words
		asked "$user" $line
		[ $status = 2 ] && jq -e '(.error | length > 3) and .status == 2' "$dir/out.json" >/dev/null || not_ok "as $user, $line: $status $(cat "$dir/out.json")"
		[ -s "$dir/err" ] || not_ok "as $user, $line: no sentence on standard error"
	done
done
# The control socket is that of the configuration, unless --socket says another one.
echo "{\"name\": \"h\", \"control_socket\": \"$dir/its.sock\"}" >"$dir/migrd.json"
at() { "$ctl" --config "$dir/migrd.json" "$@" peers --json 2>/dev/null | jq -r .error; }
if [ "$(id -u)" = 0 ]; then
	grep -q "answer on $dir/its.sock" <<<"$(at)" || not_ok "control_socket of the configuration: $(at)"
	grep -q "answer on $dir/no.sock" <<<"$(at --socket "$dir/no.sock")" || not_ok "--socket beside a configuration: $(at --socket "$dir/no.sock")"
fi

# Who names a file means its daemon, and hears if that cannot be read; doctor says what to do.
echo '{"name": "h", }' >"$dir/broken.json"
for file in none.json broken.json; do
	"$ctl" --config "$dir/$file" peers --json >"$dir/out.json" 2>"$dir/err"
	status=$?
	[ $status = 2 ] && jq -e '.status == 2' "$dir/out.json" >/dev/null && grep -q "$dir/$file" "$dir/err" || not_ok "--config $file: $status $(cat "$dir/err")"
	"$ctl" --config "$dir/$file" doctor --json >"$dir/out.json" 2>/dev/null
	status=$?
	[ $status = 1 ] && jq -e 'any(.[]; .status == "failed" and .advice)' "$dir/out.json" >/dev/null || not_ok "doctor of $file: $status $(cat "$dir/out.json")"
	"$ctl" --config "$dir/$file" pki init "$dir/ca.$file" >/dev/null || not_ok "pki needs $file"
done
if [ "$(id -u)" = 0 ]; then
	asked root peers
	grep -q "migrd --config $dir/config.json" "$dir/err" && grep -q "journalctl -u migrd" "$dir/err" || not_ok "how to start it: $(cat "$dir/err")"
fi
asked root links --vqps
[ $status = 2 ] && grep -q -- --json "$dir/err" || not_ok "links --vqps without --json: $status"
asked root migrate c
[ $status = 2 ] && [ ! -s "$dir/out.json" ] || not_ok "without --json: $status $(cat "$dir/out.json")"
asked root peers
[ $status = 3 ] && [ ! -s "$dir/out.json" ] && [ -s "$dir/err" ] || not_ok "without --json: $status $(cat "$dir/out.json")"

for pid in web 0 12x 4294967297 2147483648; do
	asked root show "$pid"
	[ $status = 2 ] && grep -q "no process number" "$dir/err" || not_ok "show $pid: $status $(cat "$dir/err")"
done

# What could not be written is not done.
"$ctl" --socket "$dir/no.sock" version >/dev/full 2>"$dir/err"
status=$?
[ $status = 1 ] && grep -q "standard output" "$dir/err" || not_ok "version on a full disk: $status $(cat "$dir/err")"

# Nor what nobody reads: a pipe whose other end is closed.
mkfifo "$dir/pipe"
exec 4<>"$dir/pipe" 5>"$dir/pipe" 4<&-
for line in version --version; do
	"$ctl" --socket "$dir/no.sock" $line >&5 2>"$dir/err"
	status=$?
	[ $status = 1 ] && grep -q "standard output" "$dir/err" || not_ok "$line to nobody: $status $(cat "$dir/err")"
done
exec 5>&-

# A word that is no command is named, whatever stands beside it.
for line in "migrat x --to y" "bogus --json" "--json bogus" bogus "link bogus rxe0" "pki bogus"; do
	# shellcheck disable=SC2086 # words
	asked root $line
	word=bogus
	[ "${line#migrat }" = "$line" ] || word=migrat
	[ $status = 2 ] && grep -qE "^migrctl: '$word' is no command of migrctl( link| pki)?; see: migrctl( link| pki)? --help\$" "$dir/err" || not_ok "$line: $status $(cat "$dir/err")"
done
asked root migrate x y
[ $status = 2 ] && grep -q -- "--to is required" "$dir/err" || not_ok "migrate without --to: $status $(cat "$dir/err")"
asked root --version
[ $status = 0 ] && [ "$(cat "$dir/out.json")" = "$("$ctl" version --json | jq -r .migrctl.release)" ] || not_ok "--version: $status $(cat "$dir/out.json")"

# What somebody has named does not steer the terminal.
asked root report $'\033[2J'
[ $status = 2 ] && ! LC_ALL=C grep -q $'\033' "$dir/err" || not_ok "a control character: $(cat "$dir/err")"

# What works without a host.
asked root pki init "$dir/ca" --json
[ $status = 0 ] && jq -e --arg d "$dir/ca" '.ca == $d' "$dir/out.json" >/dev/null || not_ok "pki init: $status $(cat "$dir/out.json")"
asked root pki host "$dir/ca" a --days 7 --json
[ $status = 0 ] && jq -e --arg d "$dir/ca/a" '.folder == $d and .days == 7' "$dir/out.json" >/dev/null || not_ok "pki host: $status $(cat "$dir/out.json")"
asked root pki init "$dir/ca" --json
[ $status = 3 ] && jq -e '.status == 3' "$dir/out.json" >/dev/null || not_ok "pki init, again: $status $(cat "$dir/out.json")"

# doctor has something to complain of here, in red where it may.
doctor="$ctl --config $dir/no.json doctor"
coloured() { LC_ALL=C grep -q $'\033\[' "$dir/said"; }
# shown terminal|pipe COMMAND: what it says there. Its status is 1, as checks fail.
shown() {
	case $1 in
	terminal) script -qec "$2" /dev/null </dev/null >"$dir/said" ;;
	pipe) sh -c "$2" </dev/null | cat >"$dir/said" ;;
	esac
	grep -q failed "$dir/said" || not_ok "doctor finds nothing wrong: $(cat "$dir/said")"
}
unset NO_COLOR
shown terminal "$doctor"; coloured || not_ok "no colour on a terminal"
shown pipe "$doctor"; ! coloured || not_ok "colour in a pipe"
shown terminal "$doctor --json"; ! coloured || not_ok "colour in JSON"
shown terminal "NO_COLOR=1 $doctor"; ! coloured || not_ok "colour on a terminal, in spite of NO_COLOR"

[ $bad = 0 ] && echo "ok: $n commands"
exit $bad
