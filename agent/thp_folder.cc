// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "huge_zero_page.h"

namespace migr {

std::string thp_folder() { return "/sys/kernel/mm/transparent_hugepage"; }

}  // namespace migr
