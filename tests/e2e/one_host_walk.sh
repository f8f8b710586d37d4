#!/bin/bash
# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# `make shapes`: the library without migrd, CRIU and a destination: its paths are switched, cut and taken back under traffic.
set -uo pipefail
# shellcheck source=tests/e2e/lib.sh disable=SC1091
. "$(dirname "$0")/lib.sh"
e2e_up || exit 1
one_host() { testbed exec peer -n --timeout 3000 -- "$E2E_ROOT/tests/libmigr/switch_test" "$@"; }
step "paths of two processes of one host are switched, in all modes" one_host -n "${SWITCHOVERS:-5}"
e2e_end
