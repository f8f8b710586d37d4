#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# What bash offers for migrctl: every command and option that it has, and no other; names that a played migrctl knows.
#   completion_test.sh MIGRCTL
set -uo pipefail
real=$1
# shellcheck source=completions/migrctl.bash disable=SC1091
. "$(dirname "$0")/../../completions/migrctl.bash"
bad=0

# offered WORD...: the completions of the last word, sorted, in one line
offered() {
	COMP_WORDS=(migrctl "$@") COMP_CWORD=$#
	COMPREPLY=()
	_migrctl
	printf '%s\n' "${COMPREPLY[@]}" | sort | xargs
}
expect() {	# WANTED WORD...
	local wanted=$1 got
	shift
	got=$(offered "$@")
	[ "$got" = "$wanted" ] && return
	echo "not ok: migrctl $*: offered '$got', not '$wanted'"
	bad=1
}

# ---- what migrctl says of itself

# help_part HEADING COMMAND...: the first words of the lines below a heading of its --help
help_part() {
	local heading=$1
	shift
	"$real" "$@" --help | sed -n "/^$heading:/,/^[A-Z].*:\$/{/^  [^ ]/p}"
}
options_of() { help_part Options "$@" | sed -E 's/^ +([^ ]+).*/\1/' | tr ',' '\n' | grep -vx -e -h | sort | xargs; }
commands_of() { help_part Subcommands "$@" | awk '{print $1}' | sort | xargs; }

[ "$(commands_of | wc -w)" -gt 10 ] || { echo "not ok: migrctl --help names no commands"; exit 1; }
expect "$(commands_of)" ""
expect "$(options_of)" -
for c in $(commands_of); do
	expect "$(options_of "$c")" "$c" -
	sub=$(commands_of "$c")
	[ -n "$sub" ] || continue
	expect "$sub" "$c" ""
	for s in $sub; do expect "$(options_of "$c" "$s")" "$c" "$s" -; done
done

# ---- names

# shellcheck disable=SC2317 # called by the completion
migrctl() {
	case "$*" in
	"ps --json") cat <<-'EOF'
		[
		  {
		    "pid": 712,
		    "comm": "kv",
		    "container": "web-1"
		  },
		  {
		    "pid": 99,
		    "container": null
		  },
		  {
		    "pid": null,
		    "container": null
		  },
		  {
		    "pid": 713,
		    "container": "web-1"
		  }
		]
	EOF
	;;
	"peers --json") printf '[\n  {\n    "name": "dst",\n    "address": "10.0.0.2:7471"\n  }\n]\n' ;;
	"history --json") printf '[\n  {\n    "id": "0000abcd",\n    "migration": 43981\n  }\n]\n' ;;
	"recover --json") printf '[\n  {\n    "id": "0000abce",\n    "migration": "0000abce",\n    "container": "db"\n  }\n]\n' ;;
	"links --json") printf '{\n  "ports": [\n    {\n      "device": "rxe0"\n    }\n  ]\n}\n' ;;
	*) echo "migrctl: needs root" >&2; return 3 ;;
	esac
}
expect web-1 migrate ""
expect web-1 migrate --to dst we
expect "" migrate x
expect "" migrate web-1 ""
expect dst migrate web-1 --to ""
expect dst doctor --peer d
expect "712 713" migrate --pid 71
expect "712 713 99 web-1" checkpoint ""
expect "712 713 99" show ""
expect 0000abcd report ""
expect 0000abce recover ""
expect "0000abce db" cancel ""
expect rxe0 link down ""
expect rxe0 links prefer --wait 5 ""
expect "--to" migrate --t
expect migrate mi
expect "--drain-limit --dry-run" migrate --dr
expect dst drain --to ""
expect "--keep-going" drain --to dst --k
expect "" drain ""
migrctl() { echo "migrctl: needs root" >&2; return 3; }
expect "" migrate ""
expect "" report ""
[ $bad = 0 ] && echo "ok"
exit $bad
