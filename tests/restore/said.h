// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What the plugin says, in a test that has a part of it. Once in a program.
#ifndef MIGR_TEST_RESTORE_SAID_H
#define MIGR_TEST_RESTORE_SAID_H

#include <cstdarg>
#include <cstdio>
#include <string>

extern "C" {
#include "../../criu-plugin/plugin.h"
}

namespace {
std::string said;
}

extern "C" void say(int, const char* fmt, ...) {
  char text[512];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  said += std::string(text) + '\n';
}

#endif
