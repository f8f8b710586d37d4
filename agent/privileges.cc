// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "privileges.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace migr {
namespace {

// Each of them with a reason in docs/threat-model.md; tests/unit/privileges_test.cc shows that one less is too little.
constexpr int kNeeded[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_NET_ADMIN, CAP_SYS_PTRACE,
                           CAP_NET_BIND_SERVICE, CAP_CHECKPOINT_RESTORE};

}  // namespace

Status drop_capabilities() {
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3]{};
  if (syscall(SYS_capget, &head, sets)) return sys_error("capget");
  __u32 needed[_LINUX_CAPABILITY_U32S_3]{};
  for (const int c : kNeeded) needed[CAP_TO_INDEX(c)] |= CAP_TO_MASK(c);
  for (int i = 0; i < _LINUX_CAPABILITY_U32S_3; i++) {
    sets[i].permitted &= needed[i];
    sets[i].effective = sets[i].permitted;
    sets[i].inheritable = 0;
  }
  if (syscall(SYS_capset, &head, sets)) return sys_error("capset");
  return {};
}

}  // namespace migr
