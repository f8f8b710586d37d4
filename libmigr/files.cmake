# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# What control.cc cannot be linked without: tests of it have these, too, and tests/fuzz, a project of its own.
set(control_needs itimer.cc cm/cm.cc cm/engine.cc)
list(TRANSFORM control_needs PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
