# shellcheck shell=bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Completion of migrctl(1) for bash; belongs into /usr/share/bash-completion/completions/migrctl.

# Values of one key in the JSON of a command of migrctl, one per line. Nothing: migrctl cannot be asked, as without root.
_migrctl_values() {	# KEY COMMAND...
	local key=$1
	shift
	migrctl "$@" --json 2>/dev/null </dev/null | sed -nE "s/^ *\"$key\": \"?([^\",]+)\"?,?\$/\1/p" | grep -vx null | sort -u
}

_migrctl_options() {	# COMMAND [COMMAND]
	case "$*" in
	migrate) echo --pid --to --dry-run --pre-copy --pre-copy-rounds --stop-and-copy --no-pre-setup --drain-limit --max-stop --json ;;
	drain) echo --to --keep-going --dry-run --pre-copy --pre-copy-rounds --stop-and-copy --no-pre-setup --drain-limit --max-stop --json ;;
	recover) echo --commit --rollback --force --json ;;
	links) echo --vqps --json ;;
	"links prefer") echo --none --wait --json ;;
	"link down") echo --force --wait --json ;;
	doctor) echo --peer --json ;;
	report) echo -o --output --json ;;
	"pki host") echo --ip --days --json ;;
	checkpoint|restore|cancel|"link up"|"pki init"|ps|show|peers|reload|history|version) echo --json ;;
	"") echo --socket --config --version ;;
	esac
	echo --help
}

_migrctl() {
	local cur prev i words=() command="" nr=0
	COMPREPLY=()
	cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
	# The command so far, and how many words follow it that are no options.
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		--socket|--config|--pid|--to|--drain-limit|--max-stop|--pre-copy-rounds|--wait|--peer|--ip|--days|-o|--output) i=$((i + 1)) ;;
		-*) ;;
		*) case "$command" in
			"") command=${COMP_WORDS[i]} ;;
			link|links|pki)
				case "$command ${COMP_WORDS[i]}" in
				"links prefer"|"link down"|"link up"|"pki init"|"pki host") command+=" ${COMP_WORDS[i]}" ;;
				*) nr=$((nr + 1)) ;;
				esac ;;
			*) nr=$((nr + 1)) ;;
			esac ;;
		esac
	done
	case $prev in
	--to|--peer) mapfile -t words < <(_migrctl_values name peers) ;;
	--pid) mapfile -t words < <(_migrctl_values pid ps) ;;
	--socket|--config|-o|--output) mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return ;;
	--drain-limit|--max-stop|--pre-copy-rounds|--wait|--ip|--days) return ;;
	*)
		if [[ $cur == -* ]]; then
			mapfile -t words < <(_migrctl_options "$command" | tr ' ' '\n')
		else
			case "$command $nr" in
			" 0") words=(migrate drain checkpoint restore cancel recover history report links link ps show peers reload doctor version pki) ;;
			"link 0") words=(down up) ;;
			"links 0") words=(prefer) ;;
			"pki 0") words=(init host) ;;
			"migrate 0") mapfile -t words < <(_migrctl_values container ps) ;;
			"checkpoint 0") mapfile -t words < <(_migrctl_values container ps; _migrctl_values pid ps) ;;
			"show 0") mapfile -t words < <(_migrctl_values pid ps) ;;
			"recover 0") mapfile -t words < <(_migrctl_values id recover) ;;
			"cancel 0") mapfile -t words < <(_migrctl_values id recover; _migrctl_values container recover) ;;
			"report 0") mapfile -t words < <(_migrctl_values id history) ;;
			"link down 0"|"link up 0"|"links prefer 0") mapfile -t words < <(_migrctl_values device links) ;;
			"checkpoint 1"|"restore 0"|"pki init 0"|"pki host 0") mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return ;;
			*) return ;;
			esac
		fi ;;
	esac
	mapfile -t COMPREPLY < <(compgen -W "${words[*]}" -- "$cur")
}
complete -F _migrctl migrctl
